//! Host memory with other owners, pinned in place.

use super::size::check_size;
use crate::context::Context;
use crate::driver::call;
use crate::error::Result;
use std::ffi::c_void;
use std::sync::Arc;

const PORTABLE: u32 = 1;
const MAPPED: u32 = 2;

/// Registration that pins host pages while this value lives, so that copies between them and any device need no
/// staging, and kernels on any device reach them by the host's address. Pages that several processes map are pinned in each.
pub struct RegisteredMemory {
    context: Arc<Context>,
    host: *mut c_void,
}

// SAFETY: only the address is stored, for unpinning, which any thread may do.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as above; this type never reads or writes the memory.
unsafe impl Sync for RegisteredMemory {}

impl RegisteredMemory {
    /// Pins memory.
    ///
    /// # Errors
    ///
    /// [`Error::Size`](crate::Error::Size) for 0 bytes, and CUDA errors, such as memory that is
    /// pinned already (712) or read-only, or the system's limit on pinned memory.
    ///
    /// # Safety
    ///
    /// `bytes` bytes are mapped at `host` until this value is dropped.
    pub unsafe fn new(context: &Arc<Context>, host: *mut u8, bytes: usize) -> Result<Self> {
        check_size("pinned memory", bytes)?;
        let host = host.cast::<c_void>();
        let _bound = context.enter()?;
        // SAFETY: the memory is mapped, as guaranteed by the caller; the context is current.
        unsafe { call!(context.driver, cuMemHostRegister_v2(host, bytes, PORTABLE | MAPPED)) }?;
        Ok(Self { context: context.clone(), host })
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: pinned by this value and used last here. An error means that CUDA is shut down already.
        let _ = unsafe { call!(self.context.driver, cuMemHostUnregister(self.host)) };
    }
}
