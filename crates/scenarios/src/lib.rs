//! Random runs under the fabric's simulator, for the tests named `sim` in fabric, the patterns and predict.
//!
//! A test calls [`seeds::each`] with a function that makes a scenario from a seed and runs it. The scenario
//! belongs to the test: the ranks' calls, the world, an [`InjectedFault`]. A [`run`] ends with the right
//! results on every rank or, after a fault, in the error that names it; never in a deadlock. For example,
//! `WEFT_SEED=17 cargo test -p weft-moe --test sim every_run` replays a run.
//!
//! - `seeds.rs`: seeds by environment, and the command that replays a failure
//! - `injected_fault.rs`: a fault in one rank or link; [`before_each_event`] injects one at each step
//! - `world.rs`: random worlds
//! - `run.rs`: programs on all ranks, and what holds after a run

mod injected_fault;
mod run;
pub mod seeds;
mod world;

pub use injected_fault::{InjectedFault, before_each_event, in_turn};
pub use run::{Failure, Program, check_outcomes, run, settle, sleeps};
pub use world::{pick, shuffled_ranks, within, world_config};
