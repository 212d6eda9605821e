//! Device memory.

use super::IpcHandle;
use super::size::check_size;
use crate::context::Context;
use crate::driver::call;
use crate::error::Result;
use std::sync::Arc;

/// Device memory, freed on drop. The initial content is undefined.
pub struct DeviceMemory {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates memory on the context's device.
    ///
    /// # Errors
    ///
    /// [`Error::Size`](crate::Error::Size) for 0 bytes, and CUDA errors.
    pub fn alloc(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        check_size("device memory", bytes)?;
        let mut address = 0;
        let _bound = context.enter()?;
        // SAFETY: writes one address; the context is current.
        unsafe { call!(context.driver, cuMemAlloc_v2(&raw mut address, bytes)) }?;
        Ok(Self { context: context.clone(), address, bytes })
    }

    /// Start address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// The memory's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// IPC handle by which another process opens it ([`PeerMemory`](crate::PeerMemory)), while this value lives.
    ///
    /// # Errors
    ///
    /// CUDA errors: some systems have no IPC.
    pub fn ipc_handle(&self) -> Result<IpcHandle> {
        IpcHandle::of(&self.context, self.address, self.bytes)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: this value owns it and uses it last here: the driver waits until uses end. An error means
        // that CUDA is shut down already.
        let _ = unsafe { call!(self.context.driver, cuMemFree_v2(self.address)) };
    }
}
