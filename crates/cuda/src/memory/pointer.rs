//! The device for an address.

use crate::driver::{call, driver};
use crate::error::{Error, Result};
use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute};

const INVALID_VALUE: u32 = 1;

/// Ordinal for the device whose memory contains an address.
///
/// # Errors
///
/// [`Error::NotOfDevice`] for host memory, pinned memory included, and for addresses that CUDA has not allocated;
/// errors from loading the driver, and CUDA errors.
pub fn device_of(address: u64) -> Result<u32> {
    match number(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
        Ok(kind) if kind == CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 => {
            number(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        }
        Ok(_) | Err(Error::Call { code: INVALID_VALUE, .. }) => Err(Error::NotOfDevice { address }),
        Err(error) => Err(error),
    }
}

/// True if the memory at an address has an IPC handle ([`IpcHandle`](crate::IpcHandle)): memory from `cuMemAlloc` has,
/// memory from the virtual memory calls (torch's expandable segments) has not.
///
/// # Errors
///
/// As [`device_of`].
pub fn is_ipc_capable(address: u64) -> Result<bool> {
    match number(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) {
        Ok(capable) => Ok(capable != 0),
        Err(Error::Call { code: INVALID_VALUE, .. }) => Err(Error::NotOfDevice { address }),
        Err(error) => Err(error),
    }
}

fn number(address: u64, attribute: CUpointer_attribute) -> Result<u32> {
    let driver = driver()?;
    let mut value = 0_u32;
    // SAFETY: these attributes have four bytes, or one in a zeroed value; the driver rejects addresses that it did
    // not allocate.
    unsafe { call!(driver, cuPointerGetAttribute((&raw mut value).cast(), attribute, address)) }?;
    Ok(value)
}
