//! Pinned host memory, accessible to devices.

use super::size::check_size;
use crate::context::Context;
use crate::driver::call;
use crate::error::Result;
use std::ffi::c_void;
use std::sync::Arc;

const PORTABLE: u32 = 1;
const MAPPED: u32 = 2;

/// Pinned host memory, which every device can load from and store to; freed on drop.
pub struct PinnedMemory {
    context: Arc<Context>,
    host: *mut c_void,
    device_address: u64,
    bytes: usize,
}

// SAFETY: plain memory, which any thread may free; callers that use `host` are responsible for that.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above; this type never reads or writes it through a shared reference.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates zeroed memory, aligned to a page.
    ///
    /// # Errors
    ///
    /// [`Error::Size`](crate::Error::Size) for 0 bytes, and CUDA errors.
    pub fn alloc(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        check_size("pinned memory", bytes)?;
        let mut host = std::ptr::null_mut();
        let _bound = context.enter()?;
        // SAFETY: writes one address; the context is current.
        unsafe { call!(context.driver, cuMemHostAlloc(&raw mut host, bytes, PORTABLE | MAPPED)) }?;
        // From here on, errors free it.
        let mut memory = Self { context: context.clone(), host, device_address: 0, bytes };
        // SAFETY: `bytes` bytes have just been allocated, and the address is not shared.
        unsafe { host.write_bytes(0, bytes) };
        let address = &raw mut memory.device_address;
        // SAFETY: writes one address; the memory was allocated as mapped.
        unsafe { call!(context.driver, cuMemHostGetDevicePointer_v2(address, host, 0)) }?;
        Ok(memory)
    }

    /// Start address for the host.
    pub fn host(&self) -> *mut u8 {
        self.host.cast()
    }

    /// Start address for devices.
    pub fn device_address(&self) -> u64 {
        self.device_address
    }

    /// Size in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: this value owns it and uses it last here. An error means that CUDA is shut down already.
        let _ = unsafe { call!(self.context.driver, cuMemFreeHost(self.host)) };
    }
}
