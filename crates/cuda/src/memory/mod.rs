//! Device and host memory, and sharing between processes.

mod descriptor;
mod device;
mod dma_buf;
mod peer;
mod pinned;
mod pointer;
mod rdma_writes;
mod registered;
mod shared;
mod size;

pub use device::DeviceMemory;
pub use dma_buf::DmaBuf;
pub use peer::{IpcHandle, PeerMemory};
pub use pinned::PinnedMemory;
pub use pointer::{device_of, is_ipc_capable};
pub(crate) use rdma_writes::RdmaAttributes;
pub use rdma_writes::{RdmaWrites, Reader};
pub use registered::RegisteredMemory;
pub use shared::VirtualMemory;
