//! Providers: device and link implementations, a folder each; [`crate::registry`] lists them. [`staged`]
//! wraps a provider that does not reach GPU memory, [`hostile`] any provider for tests. `gpu_memory.rs` is
//! shared by providers whose NICs write into GPUs, with simulated GPUs in `twin_gpus.rs`.

mod control_lanes;
pub mod copy;
mod dynamic_library;
mod gpu_memory;
mod granted_ranges;
mod granted_regions;
pub mod hostile;
mod nic_names;
pub mod ofi;
mod presence;
#[cfg(test)]
mod scatter_posts;
pub mod shm;
pub mod sim;
pub mod staged;
pub mod tcp;
mod twin_gpus;
pub mod verbs;

pub use copy::{CopyBackend, CopyConfig, CopyDevice};
pub use hostile::{HostileConfig, HostileDevice};
pub use ofi::{OfiChoice, OfiConfig, OfiDevice, OfiProvider};
pub use shm::{ShmConfig, ShmDevice};
pub use staged::{StagedConfig, StagedDevice, StagedMode, Staging};
pub use tcp::{TcpConfig, TcpDevice};
pub use verbs::{NicAddress, VerbsChoice, VerbsConfig, VerbsDevice};
