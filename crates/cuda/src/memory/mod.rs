//! Device and host memory, and its sharing between processes.

mod device;
mod dma_buf;
mod peer;
mod pinned;
mod pointer;
mod rdma_writes;
mod registered;
mod shared;

pub use device::DeviceMemory;
pub use dma_buf::DmaBuf;
pub use peer::{IpcHandle, PeerMemory};
pub use pinned::PinnedMemory;
pub use pointer::{device_of, is_ipc_capable};
pub use rdma_writes::RdmaWrites;
pub use registered::RegisteredMemory;
pub use shared::VirtualMemory;

use crate::error::{Error, Result};
use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

/// Rejects empty allocations with a uniform error.
fn check_size(what: &'static str, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Err(Error::Size { what, bytes, problem: "expected at least 1" });
    }
    Ok(())
}

/// Takes ownership of a descriptor that the driver opened, and sets close-on-exec.
///
/// # Safety
///
/// `number` is negative, or an open descriptor without another owner.
unsafe fn own(number: c_int) -> Result<OwnedFd> {
    if number < 0 {
        return Err(Error::Descriptor(format!("the driver returned the number {number}")));
    }
    // SAFETY: open and without an owner, as guaranteed by the caller.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)
        .map_err(|error| Error::Descriptor(error.to_string()))?;
    Ok(descriptor)
}
