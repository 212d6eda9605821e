//! A device's memory.

use super::{IpcHandle, check_size};
use crate::context::Context;
use crate::driver::call;
use crate::error::Result;
use std::sync::Arc;

/// Memory of a device, freed with this. It holds what it held before: nothing sets it.
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
    /// [`Error::Size`](crate::Error::Size) for none, and what CUDA says.
    pub fn alloc(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        check_size("device memory", bytes)?;
        let mut address = 0;
        let _bound = context.enter()?;
        // SAFETY: it writes one address; the context is current.
        unsafe { call!(context.driver, cuMemAlloc_v2(&raw mut address, bytes)) }?;
        Ok(Self { context: context.clone(), address, bytes })
    }

    /// Where it begins, on its device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// What another process opens it with ([`PeerMemory`](crate::PeerMemory)), while this lives.
    ///
    /// # Errors
    ///
    /// What CUDA says: not every system can.
    pub fn ipc_handle(&self) -> Result<IpcHandle> {
        IpcHandle::of(&self.context, self.address, self.bytes)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: it is ours, and this is its end: the driver waits for what uses it. An error means
        // that CUDA is gone already.
        let _ = unsafe { call!(self.context.driver, cuMemFree_v2(self.address)) };
    }
}
