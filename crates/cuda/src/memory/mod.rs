//! Memory of devices and of the host, and how other processes come to it.

mod device;
mod dma_buf;
mod peer;
mod pinned;
mod pointer;
mod registered;
mod shared;

pub use device::DeviceMemory;
pub use dma_buf::DmaBuf;
pub use peer::{IpcHandle, PeerMemory};
pub use pinned::PinnedMemory;
pub use pointer::device_of;
pub use registered::RegisteredMemory;
pub use shared::VirtualMemory;

use crate::error::{Error, Result};
use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

/// Refuses an allocation of nothing, which CUDA would refuse in other words.
fn check_size(what: &'static str, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Err(Error::Size { what, bytes, problem: "ask for one or more" });
    }
    Ok(())
}

/// A descriptor that the driver opened, closed in programs that this process starts.
///
/// # Safety
///
/// It is negative, or open and owned by nothing else.
unsafe fn own(number: c_int) -> Result<OwnedFd> {
    if number < 0 {
        return Err(Error::Descriptor(format!("the driver gave the number {number}")));
    }
    // SAFETY: it is open and not owned, by the caller's promise.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)
        .map_err(|error| Error::Descriptor(error.to_string()))?;
    Ok(descriptor)
}
