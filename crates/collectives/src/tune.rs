//! Tuner: selects the fastest algorithm for a vector size on a network, by estimated time.

use crate::algorithm::{Algorithm, Options};
use crate::any_schedule::{AnySchedule, build};
use crate::contention::{Paths, walk};
use crate::error::{Error, at_most};
use crate::op::{Collective, Op, Rank};
use crate::schedule::Schedule;
use std::fmt;
use weft_topology::EndpointId;

/// Limit on the operations in an estimated schedule.
const MAX_OPERATIONS: u64 = 1 << 24;

/// Relative difference below which times count as equal; then the lower link load decides, since drift between
/// ranks and incast cost more than estimated.
pub(crate) const SLACK: f64 = 0.05;

/// Costs besides the network links.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Seconds per step besides link latency: from posting a write until the peer acts on it.
    pub step_s: f64,
    /// Seconds to post a write; a rank posts sequentially.
    pub post_s: f64,
    /// Addition rate at a rank, in bytes per second.
    pub add_bytes_per_s: f64,
}

impl Default for Costs {
    /// 2 us per step, 0.2 us per post, 100 GB/s for additions: round numbers for one NIC per GPU. Replace them by
    /// measurements.
    fn default() -> Costs {
        Costs { step_s: 2e-6, post_s: 0.2e-6, add_bytes_per_s: 100e9 }
    }
}

/// Estimated schedule time, for ranks in lockstep. A step takes latency, posts, and the bytes on the most loaded link
/// at that link's bandwidth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Algorithm options.
    pub options: Options,
    /// Number of steps with writes.
    pub steps: u32,
    /// Maximum writes in a step on a link.
    pub max_load: u32,
    /// Seconds for latency and posts.
    pub latency_s: f64,
    /// Seconds on the links.
    pub wire_s: f64,
    /// Seconds for additions, at the rank with the most.
    pub add_s: f64,
}

impl Estimate {
    /// Total time in seconds.
    pub fn seconds(&self) -> f64 {
        self.latency_s + self.wire_s + self.add_s
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Estimate { algorithm, options, steps, max_load, .. } = self;
        write!(f, "{algorithm}")?;
        if matches!(algorithm, Algorithm::Tree | Algorithm::Chain) {
            write!(f, " of {} chunks", options.chunks)?;
        }
        write!(
            f,
            ": {} ({steps} steps take {} besides {} on the links, which up to {max_load} share",
            time(self.seconds()),
            time(self.latency_s),
            time(self.wire_s)
        )?;
        if self.add_s > 0.0 {
            write!(f, ", and {} of adding", time(self.add_s))?;
        }
        f.write_str(")")
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

impl Costs {
    fn check(&self) -> Result<(), Error> {
        let Costs { step_s, post_s, add_bytes_per_s } = *self;
        for (what, value, least) in [
            ("step_s", step_s, 0.0),
            ("post_s", post_s, 0.0),
            ("add_bytes_per_s", add_bytes_per_s, f64::MIN_POSITIVE),
        ] {
            if !(value.is_finite() && value >= least) {
                return Err(Error::InvalidCost { what, value });
            }
        }
        Ok(())
    }
}

/// Estimates one schedule for a vector of `bytes` bytes.
///
/// # Errors
/// If a cost or the placement is invalid, or the schedule or a path does not exist.
pub fn estimate(
    algorithm: Algorithm,
    options: &Options,
    schedule: &impl Schedule,
    paths: &mut impl Paths,
    placement: &[EndpointId],
    bytes: u64,
    costs: &Costs,
) -> Result<Estimate, Error> {
    costs.check()?;
    let mut sum = Estimate {
        algorithm,
        options: *options,
        steps: 0,
        max_load: 0,
        latency_s: 0.0,
        wire_s: 0.0,
        add_s: 0.0,
    };
    let links = paths.links() as usize;
    let mut carried = vec![(0u32, 0u64); links];
    let mut specs = vec![None; links];
    let mut posts = vec![0u32; schedule.ranks() as usize];
    walk(schedule, paths, placement, |paths, _, routed| {
        let (mut wire, mut latency, mut most) = (0f64, 0f64, 0);
        posts.fill(0);
        for write in &routed.writes {
            let Op::Write { source, target, .. } = write.op else { continue };
            let size = schedule.write_bytes(write.from, source, write.to, target, bytes);
            posts[write.from.0 as usize] += 1;
            most = most.max(posts[write.from.0 as usize]);
            let mut path_latency = 0.0;
            for &link in routed.path(write) {
                let at = link.0 as usize;
                let spec = specs[at].get_or_insert_with(|| paths.spec(link));
                carried[at].0 += 1;
                carried[at].1 += size;
                sum.max_load = sum.max_load.max(carried[at].0);
                wire = wire.max(carried[at].1 as f64 / spec.bandwidth);
                path_latency += spec.latency;
            }
            latency = latency.max(path_latency);
        }
        for write in &routed.writes {
            for &link in routed.path(write) {
                carried[link.0 as usize] = (0, 0);
            }
        }
        sum.steps += 1;
        sum.wire_s += wire;
        sum.latency_s += costs.step_s + latency + f64::from(most) * costs.post_s;
    })?;
    let adds = |rank| {
        let added = (0..schedule.len(rank)).filter_map(|index| match schedule.op(rank, index) {
            Op::Reduce { target, .. } => Some(schedule.span_bytes(rank, target, bytes)),
            _ => None,
        });
        added.sum::<u64>()
    };
    let most = (0..schedule.ranks()).map(|rank| adds(Rank(rank))).max().unwrap_or(0);
    sum.add_s = most as f64 / costs.add_bytes_per_s;
    Ok(sum)
}

/// Rank placements by algorithm.
#[derive(Clone, Debug)]
pub struct RankPlacements {
    /// For all algorithms but HDRM.
    pub plain: Vec<EndpointId>,
    /// For HDRM; without it, HDRM is skipped.
    pub hdrm: Option<Vec<EndpointId>>,
}

/// Chosen algorithm, with all estimates.
#[derive(Clone, Debug)]
pub struct AlgorithmChoice {
    /// Chosen estimate: among those within 5% of the fastest, the one with the lowest link load.
    pub best: Estimate,
    /// Schedule for the chosen algorithm.
    pub schedule: AnySchedule,
    /// Estimates, fastest first; for pipelined algorithms, with the best chunk count.
    pub estimates: Vec<Estimate>,
    /// Skipped algorithms, with the reason.
    pub skipped: Vec<(Algorithm, String)>,
}

impl fmt::Display for AlgorithmChoice {
    /// The choice, then a line for each alternative.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.best)?;
        for other in self.estimates.iter().filter(|&other| *other != self.best) {
            let times = other.seconds() / self.best.seconds();
            write!(f, "\n{times:.2}x the time: {other}")?;
            if times <= 1.0 {
                f.write_str(", but more load where links are shared")?;
            }
        }
        for (algorithm, why) in &self.skipped {
            write!(f, "\nnot considered: {algorithm}, {why}")?;
        }
        Ok(())
    }
}

/// Chooses the algorithm with the lowest [`estimate`] for a vector of `bytes` bytes; among those within 5%, the one
/// with the lowest link load. `local` is the rank count per node; above 1, hierarchical algorithms are included.
///
/// # Errors
/// If a cost or a placement is invalid, or no algorithm can be estimated.
pub fn tune(
    collective: Collective,
    bytes: u64,
    local: u32,
    paths: &mut impl Paths,
    placements: &RankPlacements,
    costs: &Costs,
) -> Result<AlgorithmChoice, Error> {
    let ranks = placements.plain.len() as u32;
    let mut estimates: Vec<Estimate> = Vec::new();
    let mut skipped = Vec::new();
    for &algorithm in Algorithm::of(collective) {
        let placement = match (algorithm, &placements.hdrm) {
            (Algorithm::Hdrm, Some(placement)) => placement,
            (Algorithm::Hdrm, None) => {
                skipped.push((algorithm, "it has no rank placement".to_owned()));
                continue;
            }
            (Algorithm::Hierarchical, _) if local == 1 => continue,
            // It reads within a host; a network has no such route.
            (Algorithm::DirectRead, _) => continue,
            _ => &placements.plain,
        };
        let mut best: Option<Estimate> = None;
        for chunks in chunks(algorithm, bytes) {
            let options = Options { chunks, local };
            let tried = build(collective, algorithm, ranks, &options).and_then(|schedule| {
                affordable(&schedule)?;
                estimate(algorithm, &options, &schedule, paths, placement, bytes, costs)
            });
            match tried {
                Ok(found) if best.is_none_or(|best| found.seconds() < best.seconds()) => {
                    best = Some(found);
                }
                Ok(_) => {}
                Err(error @ (Error::RankPlacement(_) | Error::InvalidCost { .. })) => {
                    return Err(error);
                }
                Err(error) => {
                    skipped.push((algorithm, error.to_string()));
                    break;
                }
            }
        }
        estimates.extend(best);
    }
    estimates.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
    let near = |one: &&Estimate| one.seconds() <= estimates[0].seconds() * (1.0 + SLACK);
    let Some(&best) = estimates.iter().filter(near).min_by_key(|one| one.max_load) else {
        let why = skipped.iter().map(|(algorithm, why)| format!("{algorithm}: {why}"));
        return Err(Error::NoCandidate(why.collect::<Vec<_>>().join("; ")));
    };
    let schedule = build(collective, best.algorithm, ranks, &best.options)?;
    Ok(AlgorithmChoice { best, schedule, estimates, skipped })
}

/// Chunk counts to estimate.
fn chunks(algorithm: Algorithm, bytes: u64) -> Vec<u32> {
    match algorithm {
        Algorithm::Tree | Algorithm::Chain => (0..10)
            .map(|power| 1 << power)
            .filter(|&c| c == 1 || u64::from(c) * 1024 <= bytes)
            .collect(),
        _ => vec![1],
    }
}

/// Rejects schedules that would take long to estimate.
fn affordable(schedule: &impl Schedule) -> Result<(), Error> {
    let needed = (0..schedule.ranks()).map(|rank| u64::from(schedule.len(Rank(rank)))).sum();
    at_most("operations to estimate", needed, MAX_OPERATIONS)
}
