//! Contention: writes per step on each link.

mod paths;

pub use crate::collision::Collision;
use crate::error::{Error, at_most};
use crate::op::{Op, OpLocation, Rank};
use crate::schedule::Schedule;
pub use paths::{BiGraphPaths, Paths};
use std::fmt;
use weft_topology::{EndpointId, LinkId};

/// Collisions stored in a report.
const KEPT: usize = 256;

/// Pairs stored per collision.
const PAIRS: usize = 64;

/// Limit on the link crossings by all writes in one step (1 GiB).
const MAX_CROSSED: u64 = 1 << 28;

/// Link load in one step, for ranks in lockstep. Drift between ranks is left to simulation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepLoad {
    /// Step.
    pub step: u32,
    /// Write count.
    pub writes: u32,
    /// Used links in order, with each link's write count.
    pub loads: Vec<(LinkId, u32)>,
    /// Largest load.
    pub max: u32,
}

/// Link loads for all steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContentionReport {
    /// Algorithm name.
    pub name: String,
    /// Steps with writes.
    pub steps: Vec<StepLoad>,
    /// Maximum writes on a link in a step.
    pub max_load: u32,
    /// Collision count.
    pub collision_count: u64,
    /// First collisions, with their ranks.
    pub collisions: Vec<Collision>,
}

impl ContentionReport {
    /// Succeeds if no two writes in a step share a link.
    ///
    /// # Errors
    /// [`Error::Contention`], with the first collision.
    pub fn require_no_collision(&self) -> Result<(), Error> {
        match self.collisions.first() {
            None => Ok(()),
            Some(first) => Err(Error::Contention {
                count: self.collision_count,
                first: Box::new(first.clone()),
            }),
        }
    }
}

impl fmt::Display for ContentionReport {
    /// A line for each step, then the stored collisions.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for StepLoad { step, writes, loads, max } in &self.steps {
            writeln!(
                f,
                "step {step}: {writes} writes on {} links, at most {max} on one",
                loads.len()
            )?;
        }
        for collision in &self.collisions {
            writeln!(f, "{collision}")?;
        }
        let more = self.collision_count - self.collisions.len() as u64;
        if more > 0 {
            writeln!(f, "and {more} more")?;
        }
        Ok(())
    }
}

/// Counts, step by step, the writes on every link, for rank `r` at endpoint `placement[r]`. Paths come from a
/// [`Router`](weft_topology::Router), or from arithmetic on a BiGraph ([`BiGraphPaths`]). A rank has one connection to
/// each peer, with flow `rank * ranks + peer`.
///
/// # Errors
/// If the placement has a wrong length, or a duplicate or missing endpoint; if there is no path; if the step numbers
/// for a rank's writes decrease.
pub fn contention(
    schedule: &impl Schedule,
    paths: &mut impl Paths,
    placement: &[EndpointId],
) -> Result<ContentionReport, Error> {
    let mut report = ContentionReport {
        name: schedule.name().to_owned(),
        steps: Vec::new(),
        max_load: 0,
        collision_count: 0,
        collisions: Vec::new(),
    };
    let mut count = vec![0u32; paths.links() as usize];
    let mut names = Vec::new();
    walk(schedule, paths, placement, |_, step, routed| {
        let mut loads = Vec::new();
        for write in &routed.writes {
            for &link in routed.path(write) {
                let load = &mut count[link.0 as usize];
                *load += 1;
                if *load == 1 {
                    loads.push((link, 0));
                }
            }
        }
        loads.sort_unstable();
        for (link, load) in &mut loads {
            *load = count[link.0 as usize];
        }
        let max = loads.iter().map(|&(_, load)| load).max().unwrap_or(0);
        if max > 1 {
            let shared = loads.iter().filter(|&&(_, load)| load > 1);
            report.collision_count += shared.clone().count() as u64;
            for &(link, load) in shared.take(KEPT - report.collisions.len()) {
                names.push(link);
                let uses = routed.writes.iter().filter(|w| routed.path(w).contains(&link));
                let pairs = uses.take(PAIRS).map(|write| (write.from, write.to)).collect();
                let name = String::new();
                report.collisions.push(Collision { step, link, name, load, pairs });
            }
        }
        for &(link, _) in &loads {
            count[link.0 as usize] = 0;
        }
        report.max_load = report.max_load.max(max);
        report.steps.push(StepLoad { step, writes: routed.writes.len() as u32, loads, max });
    })?;
    for collision in &mut report.collisions {
        collision.name = paths.name(collision.link);
    }
    Ok(report)
}

/// Writes in a step, with their paths.
pub(crate) struct RoutedWrites {
    pub(crate) writes: Vec<RoutedWrite>,
    links: Vec<LinkId>,
    /// Limit on `links`.
    limit: u64,
}

pub(crate) struct RoutedWrite {
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    pub(crate) op: Op,
    first: u32,
    end: u32,
}

impl RoutedWrites {
    fn add(&mut self, from: Rank, to: Rank, op: Op, path: &[LinkId]) -> Result<(), Error> {
        let first = self.links.len();
        let end = first + path.len();
        at_most("links crossed in one step", end as u64, self.limit)?;
        self.links.extend_from_slice(path);
        self.writes.push(RoutedWrite { from, to, op, first: first as u32, end: end as u32 });
        Ok(())
    }

    pub(crate) fn path(&self, write: &RoutedWrite) -> &[LinkId] {
        &self.links[write.first as usize..write.end as usize]
    }
}

/// Visits all steps with writes, in order.
pub(crate) fn walk<P: Paths>(
    schedule: &impl Schedule,
    paths: &mut P,
    placement: &[EndpointId],
    mut visit: impl FnMut(&P, u32, &RoutedWrites),
) -> Result<(), Error> {
    crate::verify::header(schedule)?;
    check_placement(placement, schedule.ranks(), paths.endpoints())?;
    let mut next = vec![0u32; placement.len()];
    let mut routed = RoutedWrites { writes: Vec::new(), links: Vec::new(), limit: MAX_CROSSED };
    let mut path = Vec::new();
    let mut step = 0;
    loop {
        routed.writes.clear();
        routed.links.clear();
        let mut following = None;
        for from in (0..schedule.ranks()).map(Rank) {
            let next = &mut next[from.0 as usize];
            while *next < schedule.len(from) {
                let op = schedule.op(from, *next);
                let at = OpLocation { rank: from, index: *next, op };
                crate::verify::operation(schedule, at)?;
                if let Op::Write { to, step: its, .. } = op {
                    if its > step {
                        following = Some(following.map_or(its, |other: u32| other.min(its)));
                        break;
                    }
                    if its < step {
                        return Err(Error::StepOrder { at, reached: step });
                    }
                    let flow = u64::from(from.0) * u64::from(schedule.ranks()) + u64::from(to.0);
                    paths.path(
                        placement[from.0 as usize],
                        placement[to.0 as usize],
                        flow,
                        &mut path,
                    )?;
                    routed.add(from, to, op, &path)?;
                }
                *next += 1;
            }
        }
        if !routed.writes.is_empty() {
            visit(paths, step, &routed);
        }
        match following {
            Some(following) => step = following,
            None => return Ok(()),
        }
    }
}

fn check_placement(placement: &[EndpointId], ranks: u32, endpoints: u32) -> Result<(), Error> {
    if placement.len() != ranks as usize {
        return Err(Error::RankPlacement(format!(
            "has {} endpoints for {ranks} ranks",
            placement.len()
        )));
    }
    let mut taken = vec![None; endpoints as usize];
    for (rank, endpoint) in placement.iter().enumerate() {
        let Some(place) = taken.get_mut(endpoint.0 as usize) else {
            let text = format!("puts rank {rank} on {endpoint} of {endpoints}");
            return Err(Error::RankPlacement(text));
        };
        if let Some(other) = place.replace(rank) {
            return Err(Error::RankPlacement(format!(
                "puts ranks {other} and {rank} on {endpoint}"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Span;

    #[test]
    fn a_step_that_crosses_too_many_links_is_refused() {
        let (source, target) = (Span::input(0, 1), Span::output(0, 1));
        let op = Op::Write { to: Rank(1), source, target, lane: 0, step: 0 };
        let mut routed = RoutedWrites { writes: Vec::new(), links: Vec::new(), limit: 5 };
        let path = [LinkId(0), LinkId(1)];
        for _ in 0..2 {
            routed.add(Rank(0), Rank(1), op, &path).unwrap();
        }
        let error = routed.add(Rank(0), Rank(1), op, &path).unwrap_err().to_string();
        assert_eq!(error, "links crossed in one step: 6, at most 5 allowed");
        assert_eq!(routed.path(&routed.writes[1]), path);
    }
}
