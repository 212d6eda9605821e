//! Device memory as a dma-buf, the descriptor that NICs register.

use super::descriptor::own;
use super::size::check_size;
use crate::context::Context;
use crate::driver::GetRangeHandle;
use crate::error::{Error, Result};
use crate::library::too_old;
use cudarc::driver::sys::CUmemRangeHandleType;
use std::ffi::c_int;
use std::os::fd::OwnedFd;

const CALL: &str = "cuMemGetHandleForAddressRange";

/// Dma-buf that contains a device memory range. Free the memory only after all importers of the descriptor have
/// released it.
#[derive(Debug)]
pub struct DmaBuf {
    /// Descriptor for whole host pages.
    pub descriptor: OwnedFd,
    /// Range start in it, in bytes: less than a page.
    pub offset: u64,
    /// Range length in bytes.
    pub bytes: u64,
}

impl DmaBuf {
    /// Exports memory that this process allocated on the context's device, by this crate or otherwise.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`] from a driver before CUDA 11.7, [`Error::Unsupported`] without support in the device
    /// or the kernel modules, [`Error::Size`] for 0 bytes, and CUDA errors: the range must lie in one allocation.
    pub fn of(context: &Context, address: u64, bytes: usize) -> Result<Self> {
        check_size("a dma-buf", bytes)?;
        let function = function(context.driver.range_handle)?;
        if !context.device().can_export_dma_buf() {
            return Err(Error::Unsupported {
                device: context.device().to_string(),
                what: "export its memory as a dma-buf",
                remedy: "load the open kernel modules of NVIDIA's driver (515 or newer), or copy \
                         through host memory",
            });
        }
        let (first, length) = whole_pages(address, bytes, rustix::param::page_size())?;
        let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let mut number: c_int = -1;
        let _bound = context.enter()?;
        // SAFETY: for this handle kind it writes one descriptor, an int; the driver rejects ranges
        // outside an allocation.
        let code = unsafe { function((&raw mut number).cast(), first, length, kind, 0) };
        context.driver.check(CALL, code)?;
        // SAFETY: the driver has just opened it for this process, and it has no other owner.
        let descriptor = unsafe { own(number) }?;
        Ok(Self { descriptor, offset: address - first, bytes: bytes as u64 })
    }
}

/// Driver function, or an older driver's error.
fn function(found: Option<GetRangeHandle>) -> Result<GetRangeHandle> {
    let needs = "a driver for CUDA 11.7 or newer to export memory as a dma-buf";
    found.ok_or_else(|| too_old("the CUDA driver (libcuda.so.1)", needs)(CALL))
}

/// Start and length in host pages, rounded to cover a range.
fn whole_pages(address: u64, bytes: usize, page: usize) -> Result<(u64, usize)> {
    let page = page as u64;
    let first = address - address % page;
    let end = address.checked_add(bytes as u64);
    let end = end.and_then(|end| end.checked_next_multiple_of(page));
    end.map(|end| (first, (end - first) as usize)).ok_or(Error::Size {
        what: "device memory",
        bytes,
        problem: "the range exceeds the address space",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_around_a_range_are_exported() {
        let page = 4096;
        assert_eq!(whole_pages(0x1000, 4096, page), Ok((0x1000, 4096)));
        assert_eq!(whole_pages(0x1200, 1, page), Ok((0x1000, 4096)));
        assert_eq!(whole_pages(0x1fff, 2, page), Ok((0x1000, 8192)));
        assert_eq!(whole_pages(0x1200, 0xe00, page), Ok((0x1000, 4096)));
        assert_eq!(whole_pages(0x12345, 1, 65536), Ok((0x10000, 65536)));
        assert!(matches!(whole_pages(u64::MAX - 8, 16, page), Err(Error::Size { .. })));
    }

    #[test]
    fn a_driver_without_the_call_is_an_error_that_names_the_version() {
        let error = function(None).expect_err("no function").to_string();
        assert!(error.contains("has no cuMemGetHandleForAddressRange"), "{error}");
        assert!(error.contains("CUDA 11.7 or newer"), "{error}");
    }
}
