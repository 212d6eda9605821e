//! Registered memory: of the host or of devices by address, of devices by dma-buf.

use super::super::library::Library;
use super::{MemoryRegion, ProtectionDomain, Result};
use crate::memory::DmaBuf;
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

impl ProtectionDomain {
    /// Registers memory under its own address.
    ///
    /// # Safety
    /// The memory stays valid until the registration is dropped.
    pub unsafe fn register(
        self: &Arc<Self>,
        address: u64,
        length: usize,
        access: c_uint,
    ) -> Result<MemoryRegion> {
        let start = address as *mut c_void;
        // SAFETY: by the caller's contract.
        let raw =
            unsafe { (self.library().reg_mr_iova2)(self.raw(), start, length, address, access) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("ibv_reg_mr", length))?;
        Ok(MemoryRegion { raw, domain: self.clone() })
    }

    /// Registers memory of a device under its own address, by its dma-buf.
    ///
    /// # Safety
    /// As for [`ProtectionDomain::register`].
    pub unsafe fn register_dma_buf(
        self: &Arc<Self>,
        exported: &DmaBuf,
        address: u64,
        access: c_uint,
    ) -> Result<MemoryRegion> {
        const CALL: &str = "ibv_reg_dmabuf_mr";
        let library = self.library();
        let register = library.reg_dmabuf_mr.ok_or_else(|| {
            let path = library.path.display();
            format!("{path} has no {CALL}: expected rdma-core 34 or newer; install a newer one")
        })?;
        let (length, descriptor) = (exported.bytes as usize, exported.descriptor.as_raw_fd());
        // SAFETY: by the caller's contract. The kernel keeps the dma-buf, not its descriptor.
        let raw = unsafe {
            register(self.raw(), exported.offset, length, address, descriptor, access as c_int)
        };
        let raw = NonNull::new(raw).ok_or_else(|| failed(CALL, length))?;
        Ok(MemoryRegion { raw, domain: self.clone() })
    }
}

/// Error of a failed registration, with the usual remedy.
#[cold]
fn failed(call: &str, length: usize) -> String {
    let error = io::Error::last_os_error();
    let remedy = match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM) => {
            "; raise the limit of locked memory (ulimit -l unlimited, or LimitMEMLOCK=infinity)"
        }
        Some(libc::EOPNOTSUPP) => {
            "; the NIC's driver registers no dma-buf: use Linux 5.12 or newer, or load nvidia_peermem"
        }
        _ => "",
    };
    format!("{call} of {length} bytes: {error}{remedy}")
}

impl MemoryRegion {
    /// Key for work requests of this process.
    #[inline(always)]
    pub fn local_key(&self) -> u32 {
        // SAFETY: it is registered.
        unsafe { (*self.raw()).lkey }
    }

    /// Key for RDMA writes of peers.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: it is registered.
        unsafe { (*self.raw()).rkey }
    }

    pub fn library(&self) -> &'static Library {
        self.domain.library()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::gpu::Gpus;
    use super::super::super::twin::{self, TwinConfig, TwinGpus, TwinNic};
    use super::super::Context;
    use super::*;
    use std::path::PathBuf;

    #[test]
    #[cfg_attr(miri, ignore = "twins of NICs use descriptors that miri lacks")]
    fn a_library_that_registers_no_dma_buf_is_named() {
        let nic = TwinNic::new(TwinConfig::default());
        let gpus = TwinGpus::new(&Arc::default());
        let memory = gpus.allocate(0, 1000).unwrap();
        let exported = gpus.export(&memory).unwrap();
        let path = PathBuf::from("/lib/libibverbs.so.1");
        let old = Box::leak(Box::new(Library { reg_dmabuf_mr: None, path, ..*twin::library() }));
        for (library, expected) in [
            (twin::library(), None),
            (
                &*old,
                Some(
                    "/lib/libibverbs.so.1 has no ibv_reg_dmabuf_mr: expected rdma-core 34 or newer; \
                     install a newer one",
                ),
            ),
        ] {
            let context = Arc::new(Context::open(library, &nic.name()).unwrap());
            let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
            // SAFETY: the memory outlives the registration.
            let registered = unsafe { domain.register_dma_buf(&exported, memory.address(), 0) };
            assert_eq!(registered.err().as_deref(), expected);
        }
    }
}
