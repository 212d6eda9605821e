//! Another process's memory, by IPC handle.

use crate::context::Context;
use crate::driver::call;
use crate::error::{Error, Result};
use cudarc::driver::sys::CUipcMemHandle;
use std::ffi::c_char;
use std::sync::Arc;

const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

/// IPC handle to a device memory range, for other processes on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcHandle {
    /// Driver handle to the allocation that contains the range.
    pub handle: [u8; 64],
    /// Range start in that allocation, in bytes.
    pub offset: u64,
    /// Range length in bytes.
    pub bytes: u64,
}

impl IpcHandle {
    /// Handle to a memory range that this process allocated, by [`DeviceMemory`](crate::DeviceMemory) or
    /// otherwise. The driver may place several small allocations in one, whose handle it returns.
    ///
    /// # Errors
    ///
    /// [`Error::Size`] for a range beyond the allocation, and CUDA errors.
    pub fn of(context: &Context, address: u64, bytes: usize) -> Result<Self> {
        let _bound = context.enter()?;
        let (mut base, mut length) = (0, 0);
        // SAFETY: writes an address and a length; the driver rejects unknown addresses.
        unsafe {
            call!(context.driver, cuMemGetAddressRange_v2(&raw mut base, &raw mut length, address))
        }?;
        let offset = address - base;
        if bytes as u64 > (length as u64).saturating_sub(offset) {
            let problem = "the range exceeds its allocation";
            return Err(Error::Size { what: "device memory", bytes, problem });
        }
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: writes 64 bytes.
        unsafe { call!(context.driver, cuIpcGetMemHandle(&raw mut handle, base)) }?;
        let handle = handle.reserved.map(|byte| byte as u8);
        Ok(Self { handle, offset, bytes: bytes as u64 })
    }
}

/// Another process's memory, mapped here; unmapped on drop.
pub struct PeerMemory {
    context: Arc<Context>,
    base: u64,
    offset: u64,
    bytes: usize,
}

impl PeerMemory {
    /// Maps memory from another process on this host for the context's device. The other process must keep it
    /// until this value is dropped.
    ///
    /// # Errors
    ///
    /// CUDA errors: the devices need peer access, and the memory must belong to another process.
    pub fn open_ipc(context: &Arc<Context>, handle: &IpcHandle) -> Result<Self> {
        let bytes = handle.bytes as usize;
        let reserved = handle.handle.map(|byte| byte as c_char);
        let mut base = 0;
        let _bound = context.enter()?;
        // SAFETY: writes one address; the driver checks the handle.
        unsafe {
            call!(
                context.driver,
                cuIpcOpenMemHandle_v2(
                    &raw mut base,
                    CUipcMemHandle { reserved },
                    LAZY_ENABLE_PEER_ACCESS
                )
            )
        }?;
        let memory = Self { context: context.clone(), base, offset: handle.offset, bytes };
        memory.check()?;
        Ok(memory)
    }

    /// Mapped start address.
    pub fn address(&self) -> u64 {
        self.base + self.offset
    }

    /// Size in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Checks that the range claimed by the peer lies within the mapping.
    fn check(&self) -> Result<()> {
        let (mut base, mut length) = (0, 0);
        // SAFETY: writes an address and a length, for memory that has just been mapped.
        let queried = unsafe {
            call!(
                self.context.driver,
                cuMemGetAddressRange_v2(&raw mut base, &raw mut length, self.base)
            )
        };
        // If the driver does not know the peer memory's length, the device detects invalid accesses.
        if queried.is_err() {
            return Ok(());
        }
        match self.offset.checked_add(self.bytes as u64) {
            Some(end) if end <= length as u64 => Ok(()),
            _ => {
                let problem = "the peer claims more than its allocation";
                Err(Error::Size { what: "a peer's device memory", bytes: self.bytes, problem })
            }
        }
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: opened by this value and used last here. An error means that CUDA is shut down already.
        let _ = unsafe { call!(self.context.driver, cuIpcCloseMemHandle(self.base)) };
    }
}
