//! InfiniBand and RoCE over libibverbs: reliable connections on ConnectX and any other RC device.
//!
//! Each pair of ranks has a queue pair on each NIC that both have. A part is a chain of RDMA writes; the
//! last one carries the lane as immediate: since a connection keeps order, the chain is one arrival.
//! Receives, which arrivals consume, are shared by all queue pairs on a NIC. The library is loaded at run
//! time.
//!
//! Trust: an arrival comes from the queue pair's peer, and a lane granted to another peer is dropped. A
//! key covers the whole region: the writer checks a grant's range. Fencing a peer destroys the queue
//! pairs to it, after which no NIC accesses memory for it.
//!
//! - `config.rs`, `device.rs`: configuration and NIC choice; the device
//! - `ports.rs`: reports the host's ports
//! - `library.rs`, `sys.rs`, `objects.rs`: libibverbs, C layouts, owned objects
//! - `fork.rs`: registered memory in a process that forks
//! - `nic.rs`: ports with GIDs and limits, and the choice among them
//! - `nic_address.rs`, `nic_selection.rs`: one connection's address, and the NIC that has it
//! - `interfaces.rs`: InfiniBand port addresses
//! - `rail.rs`: one NIC in one group: completion queue, shared receives, keys
//! - `pair.rs`, `chains.rs`: queue pair toward one peer, and work requests in flight on it
//! - `link/`, `peer.rs`, `region.rs`: one group's use of the device
//! - `wire.rs`: addresses and introductions as bytes
//! - `twin/`: NICs in this process, for tests without hardware

mod chains;
mod config;
mod device;
mod fork;
mod interfaces;
mod library;
mod link;
mod names;
mod nic;
mod nic_address;
mod nic_selection;
mod objects;
mod pair;
mod peer;
mod ports;
mod rail;
mod region;
mod sys;
mod twin;
mod wire;

#[doc(hidden)]
pub use super::gpu_memory::{Flush, Gpus};
#[doc(hidden)]
pub use super::twin_gpus::{TwinGpuControls, TwinGpus, TwinKernel};
pub use config::{
    ACK_TIMEOUT, DEVICES, GID_INDEX, MAX_PAGES, ON_DEMAND_PAGING, OnDemandPaging, SERVICE_LEVEL,
    TRAFFIC_CLASS, VerbsChoice, VerbsConfig,
};
pub use device::VerbsDevice;
pub use library::PATH as LIBRARY_PATH;
pub use nic_address::NicAddress;
pub use ports::{PortReport, equal_ports, library, ports, registers_dma_bufs};
#[doc(hidden)]
pub use sys::layout;
#[doc(hidden)]
pub use twin::{TwinChains, TwinConfig, TwinEvent, TwinFault, TwinNic, TwinPort, TwinStatistics};
