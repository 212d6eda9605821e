//! Twin GPUs, for tests without hardware: memory in which NIC writes are visible after a flush, and kernel stores
//! after a system-wide release.
//!
//! This is host memory marked as device memory. A simulated NIC withholds what it writes there
//! ([`withhold`]), for ever without a flush: a lane that rises before has payload that is missing. Kernels
//! ([`TwinKernel`]) withhold what they store in the same way: a NIC that reads before the release sends old bytes.
//!
//! - `memories.rs`: GPU memory in this process, writes and stores that are not visible there
//! - `kernel.rs`: kernels
//! - `gpus.rs`: GPUs as verbs and ofi use them

mod gpus;
mod kernel;
mod memories;

pub use gpus::{TwinGpus, exported_pages};
pub use kernel::TwinKernel;
pub use memories::{GpuId, TwinGpuControls, WithheldWrite, forget, memory_at, withhold};
