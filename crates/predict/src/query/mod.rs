//! Queries from front ends to accelerators, and the responses, over the network.
//!
//! A query is written into a slot at an accelerator, which serves one query at a time in arrival order; the response is
//! written into a front-end slot. Each connection has a number of slots; without a free slot a query waits at the front
//! end.
//! The same arrivals served without a network give the network's cost.
//!
//! - `job.rs`: numbers, sizes, arrivals and policy
//! - `workload.rs`: query state machine, and results

mod job;
mod workload;

pub use job::{Arrivals, Policy, QueryJob, QueryScenario};
pub use workload::QueryWorkload;

use crate::cpu::CpuTime;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::progress::Progress;
use crate::world::World;

/// Runs only this scenario on its cluster.
pub(crate) fn run(spec: &QueryScenario, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
    let cpu = CpuTime::start();
    spec.job.check()?;
    spec.cluster.check(spec.job.front_ends + spec.job.accelerators)?;
    let mut world = World::new(&spec.cluster)?;
    if spec.trace > 0 {
        world.record(spec.trace);
    }
    let mut workload = QueryWorkload::new(&mut world, &spec.job)?;
    let time_s = world.run(&mut [&mut workload], progress)?;
    let mut outcome = world.outcome(time_s, cpu, spec.links);
    outcome.results = workload.report();
    Ok(outcome)
}
