//! How many writes of a step share a link.

mod paths;

use crate::error::{At, Error, at_most};
use crate::op::{Op, Rank};
use crate::schedule::Schedule;
pub use paths::{BiGraphPaths, Paths};
use std::fmt;
use weft_topology::{EndpointId, LinkId};

/// The most collisions of which a report keeps the pairs.
const KEPT: usize = 256;

/// The most pairs that are kept of one collision.
const PAIRS: usize = 64;

/// The most links that the writes of one step may cross, each counted for each write (1 GiB of them).
const MAX_CROSSED: u64 = 1 << 28;

/// What the writes of one step do to the links. It says how many use a link if all ranks are in the same step;
/// how they drift apart in time is for a simulation to find.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepLoad {
    /// The step.
    pub step: u32,
    /// Its writes.
    pub writes: u32,
    /// Each link that is used, and the number of writes whose path it lies on, by link.
    pub loads: Vec<(LinkId, u32)>,
    /// The most of these.
    pub max: u32,
}

/// Writes of one step on one link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collision {
    /// The step.
    pub step: u32,
    /// The link.
    pub link: LinkId,
    /// Its name.
    pub name: String,
    /// How many writes share it.
    pub load: u32,
    /// Their ranks, source and destination; the first 64.
    pub pairs: Vec<(Rank, Rank)>,
}

impl fmt::Display for Collision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}: {} writes share {}:", self.step, self.load, self.name)?;
        for (i, (from, to)) in self.pairs.iter().enumerate() {
            write!(f, "{} {from} -> {to}", if i == 0 { "" } else { "," })?;
        }
        if self.pairs.len() < self.load as usize {
            f.write_str(", ...")?;
        }
        Ok(())
    }
}

/// The loads of all steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The name of the algorithm.
    pub name: String,
    /// Each step that has writes.
    pub steps: Vec<StepLoad>,
    /// The most writes on any link in any step.
    pub max_load: u32,
    /// How often a link is shared in a step.
    pub collision_count: u64,
    /// The first of these, with the ranks.
    pub collisions: Vec<Collision>,
}

impl Report {
    /// Succeeds if no two writes of a step share a link.
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

impl fmt::Display for Report {
    /// A line for each step, then the collisions that were kept.
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

/// Counts, step by step, the writes on every link, for rank `r` at endpoint `map[r]`. Paths come from a
/// [`Router`](weft_topology::Router), or from a BiGraph that was never built ([`BiGraphPaths`]). A rank has one
/// connection to each peer, whose flow is `rank * ranks + peer`.
///
/// # Errors
/// If the map has another length than there are ranks, names an endpoint twice or one that does not exist; if
/// there is no path; if the steps of a rank's writes fall.
pub fn contention(
    schedule: &impl Schedule,
    paths: &mut impl Paths,
    map: &[EndpointId],
) -> Result<Report, Error> {
    let mut report = Report {
        name: schedule.name().to_owned(),
        steps: Vec::new(),
        max_load: 0,
        collision_count: 0,
        collisions: Vec::new(),
    };
    let mut count = vec![0u32; paths.links() as usize];
    let mut names = Vec::new();
    walk(schedule, paths, map, |_, step, crossings| {
        let mut loads = Vec::new();
        for write in &crossings.writes {
            for &link in crossings.path(write) {
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
                let uses = crossings.writes.iter().filter(|w| crossings.path(w).contains(&link));
                let pairs = uses.take(PAIRS).map(|write| (write.from, write.to)).collect();
                let name = String::new();
                report.collisions.push(Collision { step, link, name, load, pairs });
            }
        }
        for &(link, _) in &loads {
            count[link.0 as usize] = 0;
        }
        report.max_load = report.max_load.max(max);
        report.steps.push(StepLoad { step, writes: crossings.writes.len() as u32, loads, max });
    })?;
    for collision in &mut report.collisions {
        collision.name = paths.name(collision.link);
    }
    Ok(report)
}

/// The writes of a step, and the links they cross.
pub(crate) struct Crossings {
    pub(crate) writes: Vec<Crossing>,
    links: Vec<LinkId>,
    /// The most links.
    limit: u64,
}

pub(crate) struct Crossing {
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    pub(crate) op: Op,
    first: u32,
    end: u32,
}

impl Crossings {
    fn add(&mut self, from: Rank, to: Rank, op: Op, path: &[LinkId]) -> Result<(), Error> {
        let first = self.links.len();
        let end = first + path.len();
        at_most("links crossed in one step", end as u64, self.limit)?;
        self.links.extend_from_slice(path);
        self.writes.push(Crossing { from, to, op, first: first as u32, end: end as u32 });
        Ok(())
    }

    pub(crate) fn path(&self, write: &Crossing) -> &[LinkId] {
        &self.links[write.first as usize..write.end as usize]
    }
}

/// Visits every step that has writes, in order.
pub(crate) fn walk<P: Paths>(
    schedule: &impl Schedule,
    paths: &mut P,
    map: &[EndpointId],
    mut visit: impl FnMut(&P, u32, &Crossings),
) -> Result<(), Error> {
    crate::verify::header(schedule)?;
    check_map(map, schedule.ranks(), paths.endpoints())?;
    let mut next = vec![0u32; map.len()];
    let mut crossings = Crossings { writes: Vec::new(), links: Vec::new(), limit: MAX_CROSSED };
    let mut path = Vec::new();
    let mut step = 0;
    loop {
        crossings.writes.clear();
        crossings.links.clear();
        let mut following = None;
        for from in (0..schedule.ranks()).map(Rank) {
            let next = &mut next[from.0 as usize];
            while *next < schedule.len(from) {
                let op = schedule.op(from, *next);
                let at = At { rank: from, index: *next, op };
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
                    paths.path(map[from.0 as usize], map[to.0 as usize], flow, &mut path)?;
                    crossings.add(from, to, op, &path)?;
                }
                *next += 1;
            }
        }
        if !crossings.writes.is_empty() {
            visit(paths, step, &crossings);
        }
        match following {
            Some(following) => step = following,
            None => return Ok(()),
        }
    }
}

fn check_map(map: &[EndpointId], ranks: u32, endpoints: u32) -> Result<(), Error> {
    if map.len() != ranks as usize {
        return Err(Error::RankMap(format!("has {} endpoints for {ranks} ranks", map.len())));
    }
    let mut taken = vec![None; endpoints as usize];
    for (rank, endpoint) in map.iter().enumerate() {
        let Some(place) = taken.get_mut(endpoint.0 as usize) else {
            let text = format!("puts rank {rank} on {endpoint} of {endpoints}");
            return Err(Error::RankMap(text));
        };
        if let Some(other) = place.replace(rank) {
            return Err(Error::RankMap(format!("puts ranks {other} and {rank} on {endpoint}")));
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
        let mut crossings = Crossings { writes: Vec::new(), links: Vec::new(), limit: 5 };
        let path = [LinkId(0), LinkId(1)];
        for _ in 0..2 {
            crossings.add(Rank(0), Rank(1), op, &path).unwrap();
        }
        let error = crossings.add(Rank(0), Rank(1), op, &path).unwrap_err().to_string();
        assert_eq!(error, "links crossed in one step: 6, at most 5 allowed");
        assert_eq!(crossings.path(&crossings.writes[1]), path);
    }
}
