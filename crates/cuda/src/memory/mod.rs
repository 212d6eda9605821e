//! Memory of devices and of the host, and how other processes come to it.

mod device;
mod peer;
mod pinned;
mod registered;
mod shared;

pub use device::DeviceMemory;
pub use peer::{IpcHandle, PeerMemory};
pub use pinned::PinnedMemory;
pub use registered::RegisteredMemory;
pub use shared::VirtualMemory;

use crate::error::{Error, Result};

/// Refuses an allocation of nothing, which CUDA would refuse in other words.
fn check_size(what: &'static str, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Err(Error::Size { what, bytes, problem: "ask for one or more" });
    }
    Ok(())
}
