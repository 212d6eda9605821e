//! Device memory shared between processes by file descriptor.

use super::descriptor::own;
use super::size::check_size;
use crate::context::Context;
use crate::device::Device;
use crate::driver::call;
use crate::error::{Error, Result};
use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1 as Flags,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Device memory, mapped for a device here: allocated here or, if imported, by a peer. The memory is freed once all
/// processes have unmapped it.
pub struct VirtualMemory {
    // Fields are dropped in this order: the mapping before the handle.
    mapping: Mapping,
    handle: Handle,
}

impl VirtualMemory {
    /// Allocates memory on the context's device and maps it for that device. The length is rounded up to the
    /// device's granularity (2 MiB); the content is undefined.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] without sharing by descriptor, [`Error::Size`] for 0 bytes, and CUDA errors.
    pub fn create(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        check_size("device memory", bytes)?;
        check_device(context.device())?;
        let _bound = context.enter()?;
        let properties = properties(context.device());
        let length = round_up(bytes, granularity(context, &properties)?)?;
        let mut handle = 0;
        // SAFETY: writes one handle, and reads properties that live through the call.
        unsafe {
            call!(context.driver, cuMemCreate(&raw mut handle, length, &raw const properties, 0))
        }?;
        let handle = Handle { context: context.clone(), handle };
        Ok(Self { mapping: Mapping::of(&handle, length)?, handle })
    }

    /// Maps memory that a peer has exported, for the context's device. `bytes` is the
    /// [length](VirtualMemory::len) at the peer.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] without sharing by descriptor, [`Error::Size`] for 0 bytes, and CUDA errors:
    /// the device needs peer access.
    pub fn import(context: &Arc<Context>, descriptor: OwnedFd, bytes: usize) -> Result<Self> {
        check_size("a peer's device memory", bytes)?;
        check_device(context.device())?;
        let _bound = context.enter()?;
        let length = round_up(bytes, granularity(context, &properties(context.device()))?)?;
        let mut handle = 0;
        // The argument is a pointer that carries the descriptor number on Linux.
        let number =
            std::ptr::without_provenance_mut(descriptor.as_raw_fd().cast_unsigned() as usize);
        // SAFETY: writes one handle; the descriptor is open and stays owned here, so it is closed below.
        unsafe {
            call!(
                context.driver,
                cuMemImportFromShareableHandle(&raw mut handle, number, DESCRIPTOR)
            )
        }?;
        let handle = Handle { context: context.clone(), handle };
        Ok(Self { mapping: Mapping::of(&handle, length)?, handle })
    }

    /// Descriptor by which a peer imports the memory.
    ///
    /// # Errors
    ///
    /// CUDA errors, and [`Error::Descriptor`].
    pub fn export(&self) -> Result<OwnedFd> {
        let context = &self.handle.context;
        let _bound = context.enter()?;
        let mut number: c_int = -1;
        let descriptor = (&raw mut number).cast::<c_void>();
        // SAFETY: for this handle kind it writes one descriptor, an int.
        unsafe {
            call!(
                context.driver,
                cuMemExportToShareableHandle(descriptor, self.handle.handle, DESCRIPTOR, 0)
            )
        }?;
        // SAFETY: the driver has just opened it for this process, and it has no other owner.
        unsafe { own(number) }
    }

    /// Lets another device in this process access it, at the same address.
    ///
    /// # Errors
    ///
    /// CUDA errors: the device needs peer access to the memory's owner.
    pub fn allow(&self, device: Device) -> Result<()> {
        let _bound = self.handle.context.enter()?;
        self.mapping.allow(device)
    }

    /// Mapped start address.
    pub fn address(&self) -> u64 {
        self.mapping.address
    }

    /// Size in bytes, rounded up to the device's granularity.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.mapping.length
    }

    /// Context for which it is mapped.
    pub fn context(&self) -> &Arc<Context> {
        &self.handle.context
    }
}

/// Handle to physical memory.
struct Handle {
    context: Arc<Context>,
    handle: CUmemGenericAllocationHandle,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: this value owns it and uses it last here; other processes' mappings keep the memory. An error
        // means that CUDA is shut down already.
        let _ = unsafe { call!(self.context.driver, cuMemRelease(self.handle)) };
    }
}

/// Reserved addresses, with memory mapped to them.
struct Mapping {
    context: Arc<Context>,
    address: u64,
    length: usize,
    mapped: bool,
}

impl Mapping {
    /// Maps memory for the context's device, which is current.
    fn of(handle: &Handle, length: usize) -> Result<Self> {
        let context = handle.context.clone();
        let mut address = 0;
        // SAFETY: writes one address; alignment and address are chosen by the driver.
        unsafe { call!(context.driver, cuMemAddressReserve(&raw mut address, length, 0, 0, 0)) }?;
        // From here on, errors undo the reservation and the mapping.
        let mut mapping = Self { context, address, length, mapped: false };
        // SAFETY: the addresses are reserved and unmapped; the handle lives.
        unsafe { call!(mapping.context.driver, cuMemMap(address, length, 0, handle.handle, 0)) }?;
        mapping.mapped = true;
        mapping.allow(mapping.context.device())?;
        Ok(mapping)
    }

    fn allow(&self, device: Device) -> Result<()> {
        let access = CUmemAccessDesc {
            location: location(device),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let driver = self.context.driver;
        // SAFETY: reads one description, which lives through the call, for mapped addresses.
        unsafe { call!(driver, cuMemSetAccess(self.address, self.length, &raw const access, 1)) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        let driver = self.context.driver;
        if self.mapped {
            // SAFETY: mapped as a whole and used last here. An error means that CUDA is shut down already, or
            // that the addresses are in use and must stay reserved.
            if unsafe { call!(driver, cuMemUnmap(self.address, self.length)) }.is_err() {
                return;
            }
        }
        // SAFETY: the addresses are owned by this value and unmapped.
        let _ = unsafe { call!(driver, cuMemAddressFree(self.address, self.length)) };
    }
}

fn check_device(device: Device) -> Result<()> {
    if device.can_share_fds() {
        return Ok(());
    }
    Err(Error::Unsupported {
        device: device.to_string(),
        what: "share its memory by file descriptor",
        remedy: "share it by IPC handle (memory=\"ipc\")",
    })
}

fn location(device: Device) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device.properties.handle,
    }
}

/// Allocation properties: device memory, shareable, and capable of GPUDirect RDMA where supported.
fn properties(device: Device) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: DESCRIPTOR,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: Flags {
            compressionType: 0,
            gpuDirectRDMACapable: device.properties.can_rdma_virtual.into(),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// Length granularity.
fn granularity(context: &Context, properties: &CUmemAllocationProp) -> Result<usize> {
    let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let mut granularity = 0;
    // SAFETY: writes one length, and reads properties that live through the call.
    unsafe {
        call!(
            context.driver,
            cuMemGetAllocationGranularity(&raw mut granularity, properties, minimum)
        )
    }?;
    Ok(granularity)
}

/// `bytes`, rounded up to a multiple of `granularity`.
fn round_up(bytes: usize, granularity: usize) -> Result<usize> {
    bytes.checked_next_multiple_of(granularity.max(1)).ok_or(Error::Size {
        what: "device memory",
        bytes,
        problem: "expected less than the address space",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_rounded_up_to_the_granularity() {
        let granularity = 2 << 20;
        assert_eq!(round_up(1, granularity), Ok(granularity));
        assert_eq!(round_up(granularity, granularity), Ok(granularity));
        assert_eq!(round_up(granularity + 1, granularity), Ok(2 * granularity));
        // An invalid zero granularity must not cause a division by zero.
        assert_eq!(round_up(5, 0), Ok(5));
        assert!(matches!(round_up(usize::MAX, granularity), Err(Error::Size { .. })));
    }
}
