//! Mixture-of-experts dispatch and combine: `weft-moe` plans on a network.
//!
//! Each round is the protocol of `docs/moe.md`: a header and the private rows for every peer at once, the remainder
//! after all headers, and replies as one write for each source. Ranks in one NVLink domain use the domain's links, all
//! others NICs, with a post queue each. Each rank begins a round after the previous one without a barrier, so a late
//! rank delays others, as in a benchmark of back-to-back rounds.
//!
//! - `job.rs`: sizes, expert choice and round costs
//! - `traffic.rs`: rows between ranks, by the planner
//! - `workload.rs`: round state machine
//! - `stages.rs`: what one rank posts in dispatch and combine, and when these end
//! - `paths.rs`: paths between ranks
//! - `rank.rs`: a rank's progress
//! - `tag.rs`: events and tags
//! - `report.rs`: results

mod job;
mod paths;
mod rank;
mod report;
mod stages;
mod tag;
mod traffic;
mod workload;

pub use job::{Copies, MoeCosts, MoeJob, MoeScenario, Nvlink, TokenRouting};
pub use workload::MoeWorkload;

use crate::cpu::CpuTime;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::progress::Progress;
use crate::world::World;

/// Runs only this scenario on its cluster.
pub(crate) fn run(spec: &MoeScenario, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
    let cpu = CpuTime::start();
    spec.job.check()?;
    spec.cluster.check(spec.job.ranks)?;
    let mut world = World::with_domains(&spec.cluster, &spec.job.private_links())?;
    if spec.trace > 0 {
        world.record(spec.trace);
    }
    let mut workload = MoeWorkload::new(&mut world, &spec.job, &spec.cluster, 0, progress)?;
    let time_s = world.run(&mut [&mut workload], progress)?;
    let mut outcome = world.outcome(time_s, cpu, spec.links);
    outcome.results = workload.report();
    Ok(outcome)
}
