//! Mixture-of-experts dispatch and combine: the plans of `weft-moe` on a network.
//!
//! Each round is the protocol that `docs/moe.md` tells: a header and the first rows leave for every peer
//! at once, the rest once all headers are in, and the answers come back as one write for each source.
//! Ranks of one NVLink domain reach each other over its links, all others over their NICs, whose posting
//! queues. Rounds follow each other on each rank without a barrier, so one that is late makes others
//! late, as in a benchmark that runs them back to back.
//!
//! - `spec.rs`: what is asked, and what it costs
//! - `traffic.rs`: who sends how much to whom, by the planner
//! - `workload.rs`: the round as a state machine on a world
//! - `dispatch.rs`, `combine.rs`: what a rank does in its two halves
//! - `paths.rs`: the ways by which ranks reach each other
//! - `rank.rs`: how far a rank is
//! - `tag.rs`: what an event stands for
//! - `report.rs`: what came out

mod combine;
mod dispatch;
mod paths;
mod rank;
mod report;
mod spec;
mod tag;
mod traffic;
mod workload;

pub use spec::{Copies, MoeCosts, MoeJob, MoeSpec, Nvlink, RoutingSpec};
pub use workload::MoeWorkload;

use crate::cpu::CpuTime;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::run::Progress;
use crate::world::World;

/// Runs the scenario alone on its cluster.
pub(crate) fn run(spec: &MoeSpec, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
    let cpu = CpuTime::start();
    spec.job.check()?;
    spec.cluster.check(spec.job.ranks)?;
    let mut world = World::with_domains(&spec.cluster, &spec.job.private_links())?;
    if spec.trace > 0 {
        world.record(spec.trace);
    }
    let mut workload = MoeWorkload::new(&mut world, &spec.job, &spec.cluster, 0)?;
    let time_s = world.run(&mut [&mut workload], progress)?;
    let mut outcome = world.outcome(time_s, cpu, spec.links);
    outcome.results = workload.report();
    Ok(outcome)
}
