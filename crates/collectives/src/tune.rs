//! Which algorithm is the fastest for a size, on a network, and why.

use crate::build::{Algorithm, AnySchedule, Options, build};
use crate::contention::{Paths, walk};
use crate::error::{Error, at_most};
use crate::op::{Collective, Op, Rank};
use crate::schedule::Schedule;
use std::fmt;
use weft_topology::EndpointId;

/// Schedules of more operations than this are not weighed.
const MAX_OPERATIONS: u64 = 1 << 24;

/// Times that differ by less than this part are as good as equal; then the lower load on links decides, since
/// ranks that are not in step, and many writes that arrive at one endpoint, cost more than is estimated.
const SLACK: f64 = 0.05;

/// What things cost besides the network's links.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Seconds of a step besides the links' latency: from a write's post until the peer acts on it.
    pub step_s: f64,
    /// Seconds to post a write; a rank posts one after another.
    pub post_s: f64,
    /// Bytes per second at which a rank adds.
    pub add_bytes_per_s: f64,
}

impl Default for Costs {
    /// 2 us for a step, 0.2 us for a post, 100 GB/s of sums: round numbers for one NIC per GPU. Measure yours.
    fn default() -> Costs {
        Costs { step_s: 2e-6, post_s: 0.2e-6, add_bytes_per_s: 100e9 }
    }
}

/// How long a schedule would take if all ranks were always in the same step. Each step takes its latency, its
/// posts, and the bytes of its fullest link at that link's speed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// With these options.
    pub options: Options,
    /// Steps that have writes.
    pub steps: u32,
    /// The most writes of one step on one link.
    pub max_load: u32,
    /// Seconds of latency and posting.
    pub latency_s: f64,
    /// Seconds on the links.
    pub wire_s: f64,
    /// Seconds of adding, at the rank that adds most.
    pub add_s: f64,
}

impl Estimate {
    /// All of it.
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
                return Err(Error::Cost { what, value });
            }
        }
        Ok(())
    }
}

/// Estimates one schedule for a vector of `bytes` bytes.
///
/// # Errors
/// If a cost is impossible, the map does not fit, or the schedule or a path is not there.
pub fn estimate(
    algorithm: Algorithm,
    options: &Options,
    schedule: &impl Schedule,
    paths: &mut impl Paths,
    map: &[EndpointId],
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
    walk(schedule, paths, map, |paths, _, crossings| {
        let (mut wire, mut latency, mut most) = (0f64, 0f64, 0);
        posts.fill(0);
        for write in &crossings.writes {
            let Op::Write { source, target, .. } = write.op else { continue };
            let size = schedule.write_bytes(write.from, source, write.to, target, bytes);
            posts[write.from.0 as usize] += 1;
            most = most.max(posts[write.from.0 as usize]);
            let mut path_latency = 0.0;
            for &link in crossings.path(write) {
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
        for write in &crossings.writes {
            for &link in crossings.path(write) {
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

/// Where ranks are.
#[derive(Clone, Debug)]
pub struct Maps {
    /// For all algorithms but HDRM.
    pub plain: Vec<EndpointId>,
    /// For HDRM; without it, HDRM is not considered.
    pub hdrm: Option<Vec<EndpointId>>,
}

/// What was chosen, and why.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The fastest; of those within 5% of it, the one with the least load on any link.
    pub best: Estimate,
    /// Its schedule.
    pub schedule: AnySchedule,
    /// All that were weighed, the fastest first; of a pipelined algorithm only its best number of chunks.
    pub weighed: Vec<Estimate>,
    /// Those that were not, and why.
    pub left_out: Vec<(Algorithm, String)>,
}

impl fmt::Display for Choice {
    /// Why.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.best)?;
        for other in self.weighed.iter().filter(|&other| *other != self.best) {
            let times = other.seconds() / self.best.seconds();
            write!(f, "\n{times:.2}x the time: {other}")?;
            if times <= 1.0 {
                f.write_str(", but more load where links are shared")?;
            }
        }
        for (algorithm, why) in &self.left_out {
            write!(f, "\nnot considered: {algorithm}, {why}")?;
        }
        Ok(())
    }
}

/// Chooses the algorithm with the least [`estimate`] for a vector of `bytes` bytes; of those within 5% of it, the
/// one that loads links least. `local` is the number of ranks of a node; above 1, hierarchical algorithms are
/// considered.
///
/// # Errors
/// If a cost is impossible, the maps do not fit, or no algorithm can be weighed.
pub fn tune(
    collective: Collective,
    bytes: u64,
    local: u32,
    paths: &mut impl Paths,
    maps: &Maps,
    costs: &Costs,
) -> Result<Choice, Error> {
    let ranks = maps.plain.len() as u32;
    let mut weighed: Vec<Estimate> = Vec::new();
    let mut left_out = Vec::new();
    for &algorithm in Algorithm::of(collective) {
        let map = match (algorithm, &maps.hdrm) {
            (Algorithm::Hdrm, Some(map)) => map,
            (Algorithm::Hdrm, None) => {
                left_out.push((algorithm, "there is no rank map for it".to_owned()));
                continue;
            }
            (Algorithm::Hierarchical, _) if local == 1 => continue,
            _ => &maps.plain,
        };
        let mut best: Option<Estimate> = None;
        for chunks in chunks(algorithm, bytes) {
            let options = Options { chunks, local };
            let tried = build(collective, algorithm, ranks, &options).and_then(|schedule| {
                affordable(&schedule)?;
                estimate(algorithm, &options, &schedule, paths, map, bytes, costs)
            });
            match tried {
                Ok(found) if best.is_none_or(|best| found.seconds() < best.seconds()) => {
                    best = Some(found);
                }
                Ok(_) => {}
                Err(error @ (Error::RankMap(_) | Error::Cost { .. })) => return Err(error),
                Err(error) => {
                    left_out.push((algorithm, error.to_string()));
                    break;
                }
            }
        }
        weighed.extend(best);
    }
    weighed.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
    let near = |one: &&Estimate| one.seconds() <= weighed[0].seconds() * (1.0 + SLACK);
    let Some(&best) = weighed.iter().filter(near).min_by_key(|one| one.max_load) else {
        let why = left_out.iter().map(|(algorithm, why)| format!("{algorithm}: {why}"));
        return Err(Error::NothingToChoose(why.collect::<Vec<_>>().join("; ")));
    };
    let schedule = build(collective, best.algorithm, ranks, &best.options)?;
    Ok(Choice { best, schedule, weighed, left_out })
}

/// The numbers of chunks to try.
fn chunks(algorithm: Algorithm, bytes: u64) -> Vec<u32> {
    match algorithm {
        Algorithm::Tree | Algorithm::Chain => (0..10)
            .map(|power| 1 << power)
            .filter(|&c| c == 1 || u64::from(c) * 1024 <= bytes)
            .collect(),
        _ => vec![1],
    }
}

/// Refuses schedules that would take long to weigh.
fn affordable(schedule: &impl Schedule) -> Result<(), Error> {
    let needed = (0..schedule.ranks()).map(|rank| u64::from(schedule.len(Rank(rank)))).sum();
    at_most("operations to weigh", needed, MAX_OPERATIONS)
}
