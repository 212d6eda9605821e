//! Registered memory: host or device memory by address, device memory by dma-buf.

use super::super::config::OnDemandPaging;
use super::super::library::Library;
use super::super::sys;
use super::{MemoryRegion, ProtectionDomain, Result, check};
use crate::memory::DmaBuf;
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

const CALL: &str = "ibv_reg_mr";
/// Bytes in one advice range, whose length has 32 bits.
const ADVISED: u64 = 1 << 30;

impl ProtectionDomain {
    /// Registers memory under the same address.
    ///
    /// # Safety
    /// The memory stays valid until the registration is dropped.
    pub unsafe fn register(
        self: &Arc<Self>,
        address: u64,
        length: usize,
        access: c_uint,
    ) -> Result<MemoryRegion> {
        // SAFETY: by the caller's contract.
        unsafe { self.try_register(address, length, access) }
            .map_err(|error| refusal(CALL, length, &error))
    }

    /// [`ProtectionDomain::register`] for host memory, which is locked or paged on demand. Also returns
    /// the error that refused to lock it, if it is paged for that reason.
    ///
    /// # Safety
    /// As for [`ProtectionDomain::register`].
    pub unsafe fn register_host(
        self: &Arc<Self>,
        address: u64,
        length: usize,
        access: c_uint,
        paging: OnDemandPaging,
    ) -> Result<(MemoryRegion, Option<io::Error>)> {
        let try_register = |access| {
            // SAFETY: by the caller's contract.
            unsafe { self.try_register(address, length, access) }
        };
        let on_demand = || {
            let region = try_register(access | sys::IBV_ACCESS_ON_DEMAND)?;
            region.prefetch(address, length as u64, access);
            Ok(region)
        };
        let registered = match paging {
            OnDemandPaging::Always => on_demand(),
            OnDemandPaging::Never | OnDemandPaging::Auto => try_register(access),
        };
        match registered {
            Ok(region) => Ok((region, None)),
            Err(refused)
                if paging == OnDemandPaging::Auto
                    && is_locking(&refused)
                    && self.context.pages_on_demand() =>
            {
                match on_demand() {
                    Ok(region) => Ok((region, Some(refused))),
                    Err(error) => {
                        Err(format!("{}; on demand: {error}", refusal(CALL, length, &refused)))
                    }
                }
            }
            Err(refused) => Err(refusal(CALL, length, &refused)),
        }
    }

    /// # Safety
    /// As for [`ProtectionDomain::register`].
    unsafe fn try_register(
        self: &Arc<Self>,
        address: u64,
        length: usize,
        access: c_uint,
    ) -> io::Result<MemoryRegion> {
        let start = address as *mut c_void;
        // SAFETY: by the caller's contract.
        let raw =
            unsafe { (self.library().reg_mr_iova2)(self.raw(), start, length, address, access) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(MemoryRegion { raw, domain: self.clone() })
    }

    /// Registers device memory under the same address, by dma-buf.
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
        // SAFETY: by the caller's contract. The kernel keeps the dma-buf, not the descriptor.
        let raw = unsafe {
            register(self.raw(), exported.offset, length, address, descriptor, access as c_int)
        };
        let raw =
            NonNull::new(raw).ok_or_else(|| refusal(CALL, length, &io::Error::last_os_error()))?;
        Ok(MemoryRegion { raw, domain: self.clone() })
    }
}

/// True for an error from the locked memory limit.
fn is_locking(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM))
}

/// Error for a failed registration, with the usual remedy.
#[cold]
fn refusal(call: &str, length: usize, error: &io::Error) -> String {
    let remedy = match error.raw_os_error() {
        _ if is_locking(error) => {
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
    /// Makes the NIC map the pages in a region paged on demand, before this returns. A driver that does
    /// not map them leaves that to the first accesses.
    fn prefetch(&self, address: u64, length: u64, access: c_uint) {
        let (domain, lkey) = (self.domain.raw(), self.local_key());
        let advice = match access & sys::IBV_ACCESS_LOCAL_WRITE {
            0 => sys::IBV_ADVISE_MR_ADVICE_PREFETCH,
            _ => sys::IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        };
        // SAFETY: the domain's context is open.
        let Some(advise) = (unsafe { sys::VerbsContext::advise_mr(self.domain.context.raw()) })
        else {
            return;
        };
        for offset in (0..length).step_by(ADVISED as usize) {
            let (addr, length) = (address + offset, (length - offset).min(ADVISED) as u32);
            let mut range = sys::Sge { addr, length, lkey };
            // SAFETY: the range lies in this region.
            let result =
                unsafe { advise(domain, advice, sys::IBV_ADVISE_MR_FLAG_FLUSH, &mut range, 1) };
            if let Err(why) = check("ibv_advise_mr", result) {
                return log::debug!("{why}; the first access of each page faults");
            }
        }
    }

    /// Key for this process's work requests.
    #[inline(always)]
    pub fn local_key(&self) -> u32 {
        // SAFETY: it is registered.
        unsafe { (*self.raw()).lkey }
    }

    /// Key for peers' RDMA writes.
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
    use super::super::super::super::gpu_memory::Gpus;
    use super::super::super::super::twin_gpus::TwinGpus;
    use super::super::super::twin::{self, TwinConfig, TwinNic};
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
