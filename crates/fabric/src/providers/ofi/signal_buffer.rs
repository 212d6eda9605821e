//! Buffer for signals: target of the peers' empty writes, and source of this rank's.

use super::super::granted_regions::RemoteMemory;
use super::objects::{Domain, MemoryRegistration, Result};
use super::sys;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::Arc;

/// Small buffer that all peers may write and that nobody writes.
pub struct SignalBuffer {
    remote: MemoryRegistration,
    /// Source registration, where the provider demands one.
    local: Option<MemoryRegistration>,
    bytes: Box<UnsafeCell<[u64; 8]>>,
}

impl SignalBuffer {
    /// Registers a buffer; `key` is even, and the next key is the source's.
    pub fn new(domain: &Arc<Domain>, key: u64) -> Result<SignalBuffer> {
        let bytes = Box::new(UnsafeCell::new([0; 8]));
        let (address, length) = (bytes.get().addr() as u64, size_of::<[u64; 8]>());
        // SAFETY: the box does not move, and is dropped after the registrations.
        let (remote, local) = unsafe {
            let remote = domain.register(address, length, None, sys::FI_REMOTE_WRITE, key)?;
            let is_local = domain.info().registers_sources();
            let local = is_local.then(|| {
                domain.register(address, length, None, sys::FI_WRITE, key.wrapping_add(1))
            });
            (remote, local.transpose()?)
        };
        Ok(SignalBuffer { remote, local, bytes })
    }

    /// Target for the peers' signals; `uses_addresses` says whether ranges have addresses or offsets.
    pub fn target(&self, uses_addresses: bool) -> RemoteMemory {
        let base = if uses_addresses { self.bytes.get().addr() as u64 } else { 0 };
        RemoteMemory { base, key: self.remote.key() }
    }

    /// Empty source range.
    pub fn source(&self) -> libc::iovec {
        libc::iovec { iov_base: self.bytes.get().cast(), iov_len: 0 }
    }

    /// Descriptor for the source range.
    pub fn descriptor(&self) -> *mut c_void {
        self.local.as_ref().map_or(std::ptr::null_mut(), MemoryRegistration::descriptor)
    }
}
