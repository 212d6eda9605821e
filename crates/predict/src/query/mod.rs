//! Queries from front ends to accelerators and answers back, over the network.
//!
//! A query is written straight into a slot of an accelerator, which serves one at a time in the order of
//! arrival, and its answer into a slot of the front end. Each connection has a number of slots; a query
//! that finds none free waits at its front end. The same arrivals served without a network say what the
//! network costs.
//!
//! - `spec.rs`: what is asked
//! - `workload.rs`: a query's way as a state machine on a world, and what came out

mod spec;
mod workload;

pub use spec::{Arrivals, Policy, QueryJob, QuerySpec};
pub use workload::QueryWorkload;

use crate::cpu::CpuTime;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::run::Progress;
use crate::world::World;

/// Runs the scenario alone on its cluster.
pub(crate) fn run(spec: &QuerySpec, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
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
