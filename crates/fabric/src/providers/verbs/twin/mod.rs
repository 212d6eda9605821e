//! RDMA NIC twin within this process, for testing and benchmarking the provider without a NIC.
//!
//! It implements the functions in `Library` and in a context's table as hardware behaves: keys, ranges
//! and states are checked, send queue slots are free once a completion behind them was read, errors flush
//! what follows, and full queues overflow. All NICs in a process are one network. Writes into simulated GPUs
//! (`twin_gpus.rs`) are withheld until a flush.
//!
//! - `twin_nic.rs`, `config.rs`, `faults.rs`, `statistics.rs`: a simulated NIC, with limits, injected
//!   faults and counters
//! - `calls.rs`, `objects.rs`, `data_path.rs`: the functions
//! - `network.rs`, `nic_info.rs`, `pair.rs`, `queues.rs`: objects behind the handles
//! - `errors.rs`: error numbers, and words for statuses and events
//! - `delivery.rs`: a write's path
//! - `null.rs`: the null device, for post benchmarks

mod calls;
mod config;
mod data_path;
mod delivery;
mod errors;
mod faults;
mod network;
mod nic_info;
mod null;
mod objects;
mod pair;
mod queues;
mod statistics;
mod twin_nic;

pub(super) use calls::library;
pub use config::{TwinConfig, TwinPort};
pub use faults::{TwinEvent, TwinFault};
pub use statistics::{TwinChains, TwinStatistics};
pub use twin_nic::TwinNic;
