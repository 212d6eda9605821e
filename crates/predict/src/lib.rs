//! Predicted times of collectives, training, MoE and query traffic on a simulated network.
//!
//! [`run`] maps a scenario to its outcome, both as JSON; `weft sim` calls it. A [`World`] is one network
//! with its routes and [`Constants`] in one virtual time; a [`Workload`] runs on it. `docs/simulator.md`
//! has the limits of the model.
//!
//! - `scenario`: the union of all scenarios, and `run`
//! - `mixture`: concurrent jobs on one network
//! - `collective`, `train`, `moe`, `dlrm`, `query`: the workloads
//! - `event_loop`, `workload`, `world`: virtual time, network, NICs
//! - `network_model`: the network model of the fabric's simulator
//! - `cluster`, `constants`, `faults`: conditions of a scenario
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
/// Processor time of a simulation.
pub use cpu::CpuTime;
/// Errors.
pub use error::Error;
/// Network model of the fabric's simulator.
pub use network_model::{MessageCosts, SimulatedNetwork};
/// Results of a run.
pub use outcome::{LinkReport, Outcome};
/// Progress of a run.
pub use progress::Progress;
/// Scenarios, JSON in and JSON out.
pub use scenario::{Scenario, run};
/// Percentiles of times.
pub use statistics::Summary;
/// Trace of a run.
pub use trace::{Span, Trace};
/// Interface of workloads.
pub use workload::Workload;
/// Network in virtual time.
pub use world::{Path, TAG_BITS, World};
