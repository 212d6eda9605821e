//! Scenarios on the network model: collectives, training and what runs beside them, on networks that one
//! need not own.
//!
//! [`run`] takes a scenario as JSON and gives back its outcome as JSON; it is what `weft sim` calls.
//! Below it, a [`World`] is one network with its routes and [`Constants`] in one virtual time, and a
//! [`Workload`] something that runs on it. `docs/simulator.md` says what the model covers and what not.

#![warn(missing_docs)]

pub mod collective;
mod constants;
mod cpu;
pub mod dlrm;
pub mod eflops;
mod error;
mod faults;
pub mod mixture;
pub mod moe;
mod network_model;
mod outcome;
pub mod query;
mod random;
mod run;
mod spec;
mod statistics;
mod trace;
pub mod train;
mod workload;
mod world;

/// What things cost.
pub use constants::Constants;
/// The processor time that a run took.
pub use cpu::CpuTime;
/// What can go wrong.
pub use error::Error;
/// The network under the fabric's simulator.
pub use network_model::{MessageCosts, SimulatedNetwork};
/// What a run came to.
pub use outcome::{LinkReport, Outcome};
/// Seeded.
pub use random::Random;
/// JSON in, JSON out.
pub use run::{Progress, run, run_spec};
/// Scenarios.
pub use spec::{Cluster, ConstantsSpec, Fault, Preset, Spec, Straggler};
/// Many times in a few numbers.
pub use statistics::Summary;
/// What happened when.
pub use trace::{Span, Trace};
/// What runs.
pub use workload::{TAG_BITS, Workload};
/// Where it runs.
pub use world::{Path, World};
