//! Scenarios on the network model: collectives, training and what runs beside them, on networks that one
//! need not own.
//!
//! [`run`] takes a scenario as JSON and gives back its outcome as JSON; it is what `weft sim` calls.
//! Below it, a [`World`] is one network with its routes and [`Constants`] in one virtual time, and a
//! [`Workload`] something that runs on it. `docs/simulator.md` says what the model covers and what not.
//!
//! ```
//! let scenario = r#"{
//!     "scenario": "collective",
//!     "cluster": {"topology": "bigraph:switches=16,endpoints=4,gbps=100,latency_us=0.5"},
//!     "job": {"collective": "all-reduce", "algorithm": "hdrm", "bytes": 64000}
//! }"#;
//! let outcome = weft_predict::run(scenario, &mut |_share, _doing| true)?;
//! let outcome: serde_json::Value = serde_json::from_str(&outcome)?;
//! // Twelve messages of 3 us, and 2 x 63,000 bytes at 12.5 GB/s.
//! assert_eq!(format!("{:.3} us", outcome["time_s"].as_f64().unwrap() * 1e6), "46.080 us");
//! assert_eq!(outcome["max_link_load"], 1);
//! # Ok::<(), weft_predict::Error>(())
//! ```

#![warn(missing_docs)]

mod check;
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
pub use random::{Random, SplitMix64};
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
