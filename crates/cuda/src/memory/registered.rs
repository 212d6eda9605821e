//! Memory of the host that is somebody else's, pinned where it lies.

use super::check_size;
use crate::context::Context;
use crate::driver::call;
use crate::error::Result;
use std::ffi::c_void;
use std::sync::Arc;

const PORTABLE: u32 = 1;

/// Pages of the host that stay where they are while this lives, so that copies between them and any
/// device need no detour. Also pages that several processes map, in each of them.
pub struct RegisteredMemory {
    context: Arc<Context>,
    host: *mut c_void,
}

// SAFETY: only the address is kept, to unpin what lies there; any thread may.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as above; nothing here reads or writes the memory.
unsafe impl Sync for RegisteredMemory {}

impl RegisteredMemory {
    /// Pins memory.
    ///
    /// # Errors
    ///
    /// [`Error::Size`](crate::Error::Size) for none, and what CUDA says, such as that it is pinned
    /// already (712), that the system pins no more, or that it may not be written.
    ///
    /// # Safety
    ///
    /// So many bytes are mapped at `host` until this is dropped.
    pub unsafe fn new(context: &Arc<Context>, host: *mut u8, bytes: usize) -> Result<Self> {
        check_size("pinned memory", bytes)?;
        let host = host.cast::<c_void>();
        let _bound = context.enter()?;
        // SAFETY: the memory is there by the caller's promise; the context is current.
        unsafe { call!(context.driver, cuMemHostRegister_v2(host, bytes, PORTABLE)) }?;
        Ok(Self { context: context.clone(), host })
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: it was pinned by this, and this is its end. An error means that CUDA is gone already.
        let _ = unsafe { call!(self.context.driver, cuMemHostUnregister(self.host)) };
    }
}
