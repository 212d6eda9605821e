//! Device properties, queried once.

use crate::memory::RdmaAttributes;
use cudarc::driver::sys::CUdevice;

/// Device properties, queried once.
pub(crate) struct Properties {
    pub(crate) ordinal: u32,
    pub(crate) handle: CUdevice,
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
    pub(crate) bus_id: String,
    pub(crate) compute_capability: (u32, u32),
    pub(crate) has_dependent_launch: bool,
    pub(crate) sm_count: u32,
    pub(crate) memory_bytes: usize,
    pub(crate) max_shared_per_block: u32,
    pub(crate) is_mig: bool,
    pub(crate) can_share_fds: bool,
    pub(crate) can_rdma_virtual: bool,
    pub(crate) can_export_dma_buf: bool,
    pub(crate) rdma_writes: RdmaAttributes,
}
