//! The device that an address belongs to.

use crate::driver::{call, driver};
use crate::error::{Error, Result};
use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute};

const INVALID_VALUE: u32 = 1;

/// The ordinal of the device that the memory at an address is of.
///
/// # Errors
///
/// [`Error::NotOfDevice`] for memory of the host, pinned memory included, and for addresses that CUDA
/// has not allocated; what loading the driver returns, and what CUDA reports.
pub fn device_of(address: u64) -> Result<u32> {
    let driver = driver()?;
    let number = |attribute| {
        let mut value = 0_u32;
        // SAFETY: these attributes are four bytes each; the driver refuses an address that it did not
        // give out.
        unsafe {
            call!(driver, cuPointerGetAttribute((&raw mut value).cast(), attribute, address))
        }?;
        Ok(value)
    };
    match number(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
        Ok(kind) if kind == CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 => {
            number(CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        }
        Ok(_) | Err(Error::Call { code: INVALID_VALUE, .. }) => Err(Error::NotOfDevice { address }),
        Err(error) => Err(error),
    }
}
