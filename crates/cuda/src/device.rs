//! Device and properties.

use crate::Error;
use crate::driver::{Driver, call, driver};
use crate::error::Result;
use crate::memory::{RdmaAttributes, RdmaWrites, Reader};
use crate::properties::Properties;
use cudarc::driver::sys::{CUdevice, CUdevice_attribute as Attribute, CUuuid};
use std::ffi::{CStr, c_char};
use std::fmt;
use std::sync::PoisonError;

/// Device visible to this process: a GPU, or a MIG slice.
#[derive(Clone, Copy)]
pub struct Device {
    pub(crate) properties: &'static Properties,
}

impl Device {
    /// Ordinal among the devices visible to this process.
    pub fn ordinal(self) -> u32 {
        self.properties.ordinal
    }

    /// Product name.
    pub fn name(self) -> &'static str {
        &self.properties.name
    }

    /// Globally unique id; each MIG slice has one.
    pub fn uuid(self) -> [u8; 16] {
        self.properties.uuid
    }

    /// PCI address, as `0000:1b:00.0`.
    pub fn bus_id(self) -> &'static str {
        &self.properties.bus_id
    }

    /// Compute capability: `(9, 0)` for Hopper.
    pub fn compute_capability(self) -> (u32, u32) {
        self.properties.compute_capability
    }

    /// True if kernels may start before the previous kernel on the stream has ended
    /// ([`Start::Dependent`](crate::Start::Dependent)), eager and under capture: compute capability 9.0, and a
    /// driver for CUDA 12.3.
    pub fn has_dependent_launch(self) -> bool {
        self.properties.has_dependent_launch
    }

    /// SM count.
    pub fn sm_count(self) -> u32 {
        self.properties.sm_count
    }

    /// Device memory, in bytes.
    pub fn memory_bytes(self) -> usize {
        self.properties.memory_bytes
    }

    /// Largest opt-in shared memory for a block, in bytes.
    pub fn max_shared_per_block(self) -> u32 {
        self.properties.max_shared_per_block
    }

    /// True for a MIG slice. Slices have no peer access.
    pub fn is_mig(self) -> bool {
        self.properties.is_mig
    }

    /// True if memory can be shared with other processes by file descriptor.
    pub fn can_share_fds(self) -> bool {
        self.properties.can_share_fds
    }

    /// True if memory can be exported as a dma-buf for NICs.
    pub fn can_export_dma_buf(self) -> bool {
        self.properties.can_export_dma_buf
    }

    /// Visibility to a reader of NIC writes into device memory.
    pub fn rdma_writes(self, reader: Reader) -> RdmaWrites {
        self.properties.rdma_writes.writes(reader)
    }

    /// True if the device can load from and store to memory on `other`; always true for itself.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn can_access(self, other: Self) -> Result<bool> {
        if self == other {
            return Ok(true);
        }
        let mut can = 0;
        let (own, peer) = (self.properties.handle, other.properties.handle);
        // SAFETY: writes one integer, and both handles came from the driver.
        unsafe { call!(driver()?, cuDeviceCanAccessPeer(&raw mut can, own, peer)) }?;
        Ok(can != 0)
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.properties.ordinal == other.properties.ordinal
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "cuda:{} ({})", self.properties.ordinal, self.properties.name)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, formatter)
    }
}

impl Driver {
    /// Device with this ordinal, among those visible to this process.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`], and CUDA errors.
    pub fn device(&self, ordinal: u32) -> Result<Device> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(properties) = devices.get(&ordinal) {
            return Ok(Device { properties });
        }
        let count = self.device_count()?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let properties: &'static Properties = Box::leak(Box::new(self.query_properties(ordinal)?));
        devices.insert(ordinal, properties);
        Ok(Device { properties })
    }

    /// Queries all device properties.
    pub(crate) fn query_properties(&self, ordinal: u32) -> Result<Properties> {
        let mut handle = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, cuDeviceGet(&raw mut handle, ordinal.cast_signed())) }?;

        let mut name = [0; 256];
        // SAFETY: writes at most 255 characters, ending with NUL.
        unsafe { call!(self, cuDeviceGetName(name.as_mut_ptr(), 255, handle)) }?;
        let mut bus_id = [0; 32];
        // SAFETY: as above.
        unsafe { call!(self, cuDeviceGetPCIBusId(bus_id.as_mut_ptr(), 31, handle)) }?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: writes 16 bytes.
        unsafe { call!(self, cuDeviceGetUuid_v2(&raw mut uuid, handle)) }?;
        let mut memory_bytes = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, cuDeviceTotalMem_v2(&raw mut memory_bytes, handle)) }?;

        let number = |attribute| {
            let mut value = 0;
            // SAFETY: writes one integer.
            unsafe { call!(self, cuDeviceGetAttribute(&raw mut value, attribute, handle)) }?;
            Ok(value.unsigned_abs())
        };
        // An attribute unknown to an older driver counts as unsupported.
        let can = |attribute| number(attribute).is_ok_and(|value| value != 0);
        let rdma_writes = RdmaAttributes {
            ordering: number(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
                .unwrap_or_default(),
            flush_options: number(
                Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
            )
            .unwrap_or_default(),
        };
        let name = text(&name);
        let major = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Properties {
            ordinal,
            handle,
            is_mig: name.contains(" MIG ") || self.is_slice(handle, &uuid),
            name,
            uuid: uuid.bytes.map(|byte| byte as u8),
            bus_id: text(&bus_id),
            compute_capability: (major, minor),
            has_dependent_launch: major >= 9 && self.version() >= 12_030,
            sm_count: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory_bytes,
            max_shared_per_block: number(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            can_share_fds: can(
                Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            ) && can(
                Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            ),
            can_export_dma_buf: can(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
            rdma_writes,
            can_rdma_virtual: can(
                Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            ),
        })
    }

    /// True if the device's UUID differs from its GPU's, which the older call returns.
    fn is_slice(&self, handle: CUdevice, own: &CUuuid) -> bool {
        let Some(function) = self.physical_uuid else { return false };
        let mut physical = CUuuid { bytes: [0; 16] };
        // SAFETY: writes 16 bytes.
        let code = unsafe { function(&raw mut physical, handle) };
        code == 0 && physical.bytes != own.bytes
    }
}

/// Text in a NUL-terminated field.
fn text(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field.iter().map(|&c| c as u8).collect();
    CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned()
}
