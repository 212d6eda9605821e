//! Mixture-of-experts dispatch and combine: the plans of `weft-moe` on a network.
//!
//! Each round is the protocol of `docs/moe.md`: a header and the private rows for every peer at once, the
//! remainder after all headers, and replies as one write for each source. Ranks of one NVLink domain use
//! its links, all others their NICs, with a post queue each. Each rank begins a round after the previous
//! one without a barrier, so a late rank delays others, as in a benchmark of back-to-back rounds.
//!
//! - `job.rs`: sizes, expert choice and costs of the rounds
//! - `traffic.rs`: rows between ranks, by the planner
//! - `workload.rs`: state machine of the rounds
//! - `stages.rs`: the posts of dispatch and combine at one rank, and their ends
//! - `paths.rs`: paths between ranks
//! - `rank.rs`: progress of a rank
//! - `tag.rs`: events and their tags
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

/// Runs the scenario alone on its cluster.
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
