//! A device's memory that other processes are given by file descriptor.

use super::{check_size, own};
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

/// Memory of a device, mapped for a device here (its own or, imported, a peer's). The memory is freed
/// when the last process that maps it has unmapped it.
pub struct VirtualMemory {
    // Fields are dropped in this order: what is mapped is unmapped before its handle is released.
    mapping: Mapping,
    handle: Handle,
}

impl VirtualMemory {
    /// Allocates memory on the context's device and maps it for that device. Its length is rounded up
    /// to what the device allocates (2 MiB); it is not set to anything.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where memory cannot be shared by descriptor, [`Error::Size`] for none,
    /// and what CUDA says.
    pub fn create(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        check_size("device memory", bytes)?;
        check_device(context.device())?;
        let _bound = context.enter()?;
        let properties = properties(context.device());
        let length = round_up(bytes, granularity(context, &properties)?)?;
        let mut handle = 0;
        // SAFETY: it writes one handle, and reads properties that live through the call.
        unsafe {
            call!(context.driver, cuMemCreate(&raw mut handle, length, &raw const properties, 0))
        }?;
        let handle = Handle { context: context.clone(), handle };
        Ok(Self { mapping: Mapping::of(&handle, length)?, handle })
    }

    /// Maps memory that a peer has exported, for the context's device. `bytes` is the
    /// [length](VirtualMemory::len) that the peer has.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where memory cannot be shared by descriptor, [`Error::Size`] for none,
    /// and what CUDA says: the device must reach the peer's.
    pub fn import(context: &Arc<Context>, descriptor: OwnedFd, bytes: usize) -> Result<Self> {
        check_size("a peer's device memory", bytes)?;
        check_device(context.device())?;
        let _bound = context.enter()?;
        let length = round_up(bytes, granularity(context, &properties(context.device()))?)?;
        let mut handle = 0;
        // The driver takes the descriptor's number where on other systems it takes an address.
        let number =
            std::ptr::without_provenance_mut(descriptor.as_raw_fd().cast_unsigned() as usize);
        // SAFETY: it writes one handle; the descriptor is open, and stays ours, so it is closed below.
        unsafe {
            call!(
                context.driver,
                cuMemImportFromShareableHandle(&raw mut handle, number, DESCRIPTOR)
            )
        }?;
        let handle = Handle { context: context.clone(), handle };
        Ok(Self { mapping: Mapping::of(&handle, length)?, handle })
    }

    /// A descriptor that a peer imports the memory with.
    ///
    /// # Errors
    ///
    /// What CUDA says, and [`Error::Descriptor`].
    pub fn export(&self) -> Result<OwnedFd> {
        let context = &self.handle.context;
        let _bound = context.enter()?;
        let mut number: c_int = -1;
        let answer = (&raw mut number).cast::<c_void>();
        // SAFETY: for handles of this kind it writes one descriptor, an int.
        unsafe {
            call!(
                context.driver,
                cuMemExportToShareableHandle(answer, self.handle.handle, DESCRIPTOR, 0)
            )
        }?;
        // SAFETY: the driver has just opened it for us, and nothing else owns it.
        unsafe { own(number) }
    }

    /// Lets another device of this process use the memory too, at the same address.
    ///
    /// # Errors
    ///
    /// What CUDA says: the device must reach the one that has the memory.
    pub fn allow(&self, device: Device) -> Result<()> {
        let _bound = self.handle.context.enter()?;
        self.mapping.allow(device)
    }

    /// Where it begins, as mapped here.
    pub fn address(&self) -> u64 {
        self.mapping.address
    }

    /// Its bytes, rounded up to what the device allocates.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.mapping.length
    }

    /// The context that it is mapped for.
    pub fn context(&self) -> &Arc<Context> {
        &self.handle.context
    }
}

/// Memory, wherever it is.
struct Handle {
    context: Arc<Context>,
    handle: CUmemGenericAllocationHandle,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: it is ours, and this is its end; what is mapped elsewhere keeps the memory. An error
        // means that CUDA is gone already.
        let _ = unsafe { call!(self.context.driver, cuMemRelease(self.handle)) };
    }
}

/// Addresses, with memory behind them.
struct Mapping {
    context: Arc<Context>,
    address: u64,
    length: usize,
    mapped: bool,
}

impl Mapping {
    /// Maps memory for the device of its context, which is current.
    fn of(handle: &Handle, length: usize) -> Result<Self> {
        let context = handle.context.clone();
        let mut address = 0;
        // SAFETY: it writes one address; alignment and wish are left to the driver.
        unsafe { call!(context.driver, cuMemAddressReserve(&raw mut address, length, 0, 0, 0)) }?;
        // From here on what was done is undone if something fails.
        let mut mapping = Self { context, address, length, mapped: false };
        // SAFETY: the addresses are reserved and nothing is mapped there; the handle lives.
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
        // SAFETY: it reads one description, which lives through the call, of what is mapped.
        unsafe { call!(driver, cuMemSetAccess(self.address, self.length, &raw const access, 1)) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        let driver = self.context.driver;
        if self.mapped {
            // SAFETY: it is mapped, as a whole, and this is its end. An error means that CUDA is gone
            // already, or that addresses in use are being unmapped, which must not be given back.
            if unsafe { call!(driver, cuMemUnmap(self.address, self.length)) }.is_err() {
                return;
            }
        }
        // SAFETY: the addresses are ours, and nothing is mapped there any more.
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

/// What memory is asked for: of the device, to be shared, and good for a NIC where it can be.
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

/// Lengths are multiples of this.
fn granularity(context: &Context, properties: &CUmemAllocationProp) -> Result<usize> {
    let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let mut granularity = 0;
    // SAFETY: it writes one length, and reads properties that live through the call.
    unsafe {
        call!(
            context.driver,
            cuMemGetAllocationGranularity(&raw mut granularity, properties, minimum)
        )
    }?;
    Ok(granularity)
}

/// The least multiple of `granularity` that holds so many bytes.
fn round_up(bytes: usize, granularity: usize) -> Result<usize> {
    bytes.checked_next_multiple_of(granularity.max(1)).ok_or(Error::Size {
        what: "device memory",
        bytes,
        problem: "no address space is so large",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_rounded_up_to_what_the_device_allocates() {
        let granularity = 2 << 20;
        assert_eq!(round_up(1, granularity), Ok(granularity));
        assert_eq!(round_up(granularity, granularity), Ok(granularity));
        assert_eq!(round_up(granularity + 1, granularity), Ok(2 * granularity));
        // A driver that gives nonsense is no reason to divide by it.
        assert_eq!(round_up(5, 0), Ok(5));
        assert!(matches!(round_up(usize::MAX, granularity), Err(Error::Size { .. })));
    }
}
