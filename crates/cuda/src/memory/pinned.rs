//! Memory of the host that devices reach.

use super::check_size;
use crate::context::Context;
use crate::driver::call;
use crate::error::Result;
use std::ffi::c_void;
use std::sync::Arc;

const PORTABLE: u32 = 1;
const MAPPED: u32 = 2;

/// Pinned memory of the host, which every device may load from and store to; freed with this.
pub struct PinnedMemory {
    context: Arc<Context>,
    host: *mut c_void,
    device_address: u64,
    bytes: usize,
}

// SAFETY: it is plain memory, which any thread may free; who uses it through `host` answers for that.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above; nothing here reads or writes it through a shared reference.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates memory, all zero, aligned to a page.
    ///
    /// # Errors
    ///
    /// [`Error::Size`](crate::Error::Size) for none, and what CUDA says.
    pub fn alloc(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        check_size("pinned memory", bytes)?;
        let mut host = std::ptr::null_mut();
        let _bound = context.enter()?;
        // SAFETY: it writes one address; the context is current.
        unsafe { call!(context.driver, cuMemHostAlloc(&raw mut host, bytes, PORTABLE | MAPPED)) }?;
        // From here on it is freed if something fails.
        let mut memory = Self { context: context.clone(), host, device_address: 0, bytes };
        // SAFETY: so many bytes have just been allocated, and none else has their address.
        unsafe { host.write_bytes(0, bytes) };
        let address = &raw mut memory.device_address;
        // SAFETY: it writes one address; the memory was allocated as mapped.
        unsafe { call!(context.driver, cuMemHostGetDevicePointer_v2(address, host, 0)) }?;
        Ok(memory)
    }

    /// Where it begins, for the host.
    pub fn host(&self) -> *mut u8 {
        self.host.cast()
    }

    /// Where it begins, for devices.
    pub fn device_address(&self) -> u64 {
        self.device_address
    }

    /// Its bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: it is ours, and this is its end. An error means that CUDA is gone already.
        let _ = unsafe { call!(self.context.driver, cuMemFreeHost(self.host)) };
    }
}
