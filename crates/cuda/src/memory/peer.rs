//! Another process's memory, by IPC handle.

use crate::context::Context;
use crate::driver::call;
use crate::error::{Error, Result};
use cudarc::driver::sys::CUipcMemHandle;
use std::ffi::c_char;
use std::sync::Arc;

const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

/// What names a stretch of device memory to other processes of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcHandle {
    /// The driver's handle, of the whole allocation that the stretch is in.
    pub handle: [u8; 64],
    /// Where in that allocation the stretch begins, in bytes.
    pub offset: u64,
    /// Its length, in bytes.
    pub bytes: u64,
}

impl IpcHandle {
    /// The handle of a stretch of memory that this process allocated, by
    /// [`DeviceMemory`](crate::DeviceMemory) or otherwise: the driver may have put several small
    /// allocations into one, of which it gives the handle.
    ///
    /// # Errors
    ///
    /// [`Error::Size`] if the stretch is longer than its allocation, and what CUDA says.
    pub fn of(context: &Context, address: u64, bytes: usize) -> Result<Self> {
        let _bound = context.enter()?;
        let (mut base, mut length) = (0, 0);
        // SAFETY: it writes an address and a length; the driver refuses an address it does not know.
        unsafe {
            call!(context.driver, cuMemGetAddressRange_v2(&raw mut base, &raw mut length, address))
        }?;
        let offset = address - base;
        if bytes as u64 > (length as u64).saturating_sub(offset) {
            let problem = "the allocation they begin in ends before they do";
            return Err(Error::Size { what: "device memory", bytes, problem });
        }
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: it writes 64 bytes.
        unsafe { call!(context.driver, cuIpcGetMemHandle(&raw mut handle, base)) }?;
        let handle = handle.reserved.map(|byte| byte as u8);
        Ok(Self { handle, offset, bytes: bytes as u64 })
    }
}

/// Another process's memory, mapped here; unmapped with this.
pub struct PeerMemory {
    context: Arc<Context>,
    base: u64,
    offset: u64,
    bytes: usize,
}

impl PeerMemory {
    /// Maps memory of another process of this host for the context's device. The other process must
    /// keep it until this is dropped.
    ///
    /// # Errors
    ///
    /// What CUDA says: the devices must reach each other, and the memory must be another process's.
    pub fn open_ipc(context: &Arc<Context>, handle: &IpcHandle) -> Result<Self> {
        let bytes = handle.bytes as usize;
        let reserved = handle.handle.map(|byte| byte as c_char);
        let mut base = 0;
        let _bound = context.enter()?;
        // SAFETY: it writes one address; the driver checks the handle.
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

    /// Where it begins, as mapped here.
    pub fn address(&self) -> u64 {
        self.base + self.offset
    }

    /// Its bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether what the peer claims lies within what was mapped.
    fn check(&self) -> Result<()> {
        let (mut base, mut length) = (0, 0);
        // SAFETY: it writes an address and a length, of memory that has just been mapped.
        let answer = unsafe {
            call!(
                self.context.driver,
                cuMemGetAddressRange_v2(&raw mut base, &raw mut length, self.base)
            )
        };
        // A driver that does not know of others' memory how long it is leaves it to the device to say.
        if answer.is_err() {
            return Ok(());
        }
        match self.offset.checked_add(self.bytes as u64) {
            Some(end) if end <= length as u64 => Ok(()),
            _ => {
                let problem = "the peer's allocation is shorter than it says";
                Err(Error::Size { what: "a peer's device memory", bytes: self.bytes, problem })
            }
        }
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: it was opened by this, and this is its end. An error means that CUDA is gone already.
        let _ = unsafe { call!(self.context.driver, cuIpcCloseMemHandle(self.base)) };
    }
}
