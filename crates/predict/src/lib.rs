//! Predicted times for collectives, training, MoE and query traffic on a simulated network.
//!
//! [`run`] maps a scenario to an outcome, both as JSON; `weft sim` calls it. A [`World`] is one network with routes and
//! [`Constants`] in one virtual time; a [`Workload`] runs on it. `docs/simulator.md` has the model's limits.
//!
//! - `scenario`: the union over all scenarios, and `run`
//! - `mixture`: concurrent jobs on one network
//! - `collective`, `train`, `moe`, `dlrm`, `query`: the workloads
//! - `event_loop`, `workload`, `world`: virtual time, network, NICs
//! - `network_model`: network model for the fabric's simulator
//! - `cluster`, `constants`, `faults`: scenario conditions
//! - `outcome`, `statistics`, `trace`: results
//! - `check`, `cpu`, `error`, `progress`: shared leaves
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
mod cluster;
pub mod collective;
mod constants;
mod cpu;
pub mod dlrm;
mod error;
mod event_loop;
mod faults;
pub mod mixture;
pub mod moe;
mod network_model;
mod outcome;
mod progress;
pub mod query;
mod scenario;
mod statistics;
mod trace;
pub mod train;
mod workload;
mod world;

/// Network, routing, faults and stragglers.
pub use cluster::{Cluster, ConstantOverrides, Fault, Straggler};
/// Costs beyond bandwidth and latency.
pub use constants::Constants;
/// Processor time that a simulation takes.
pub use cpu::CpuTime;
/// Errors.
pub use error::Error;
/// Network model for the fabric's simulator.
pub use network_model::{MessageCosts, SimulatedNetwork};
/// Run results.
pub use outcome::{LinkReport, Outcome};
/// Run progress.
pub use progress::Progress;
/// Scenarios, JSON in and JSON out.
pub use scenario::{Scenario, run};
/// Time percentiles.
pub use statistics::Summary;
/// Run trace.
pub use trace::{Span, Trace};
/// Workload interface.
pub use workload::Workload;
/// Network in virtual time.
pub use world::{Path, TAG_BITS, World};
