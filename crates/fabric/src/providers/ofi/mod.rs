//! Libfabric networks: EFA, and other reliable datagram providers.
//!
//! A part is one RDMA write with the lane as remote CQ data (`fi_writemsg`). The provider assumes no
//! order, and does not know who sent an arrival: the lane table holds each lane's peer. The library is
//! loaded at run time. Demands that a libfabric provider makes on the caller, memory registration modes
//! above all, are read from the offer (`info.rs`).
//!
//! Payload in a GPU is made visible between a completion batch and the lanes that it raises (`../gpu_memory.rs`).
//!
//! Trust: a region's key is the right to write to the region. A reliable datagram endpoint can neither
//! disconnect one peer nor check a grant per peer. Therefore keys are random, a released region's key is
//! void, and fencing a lost group closes its endpoints.
//!
//! - `config.rs`, `device.rs`: configuration and NIC choice; the device
//! - `library.rs`, `sys.rs`, `objects.rs`: libfabric, C layouts, owned objects
//! - `signals.rs`: the program's signal actions, restored after libfabric loads
//! - `info.rs`, `offers.rs`: libfabric offers, and a report on them
//! - `rail.rs`: one NIC in one group: endpoint, completion queue, writes in flight
//! - `signal_buffer.rs`, `efa_options.rs`: target and source of signals; EFA's endpoint options
//! - `slots.rs`: scratch memory for each operation in flight, and how it is used
//! - `link/`, `peer.rs`, `post_limits.rs`, `region.rs`: one group's use of the device
//! - `wire.rs`: addresses, introductions, grants as bytes

mod config;
mod device;
mod efa_options;
mod info;
mod library;
mod link;
mod objects;
mod offers;
mod peer;
mod post_limits;
mod rail;
mod region;
mod signal_buffer;
mod signals;
mod slots;
mod sys;
mod wire;

#[doc(hidden)]
pub use super::gpu_memory::{Flush, Gpus};
#[doc(hidden)]
pub use super::twin_gpus::{TwinGpuControls, TwinGpus, TwinKernel};
pub use config::{CHECK_SENDERS, DOMAINS, OfiChoice, OfiConfig, PROVIDER, device_of_domain};
pub use device::OfiDevice;
pub use info::OfiProvider;
pub use library::PATH as LIBRARY_PATH;
pub use offers::{Offer, built_in, library, offers};
#[doc(hidden)]
pub use sys::layout;
