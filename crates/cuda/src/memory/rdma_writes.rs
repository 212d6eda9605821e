//! Visibility of the writes that NICs make into device memory.
//!
//! A NIC reports a write in host memory, while its bytes are on the way to a device. The driver reports whether
//! the platform orders the two, and can wait for the bytes where it does not.

use crate::context::Context;
use crate::driver::call;
use crate::error::Result;
use cudarc::driver::sys::{
    CUGPUDirectRDMAWritesOrdering, CUflushGPUDirectRDMAWritesOptions,
    CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget,
};

/// Visibility of a NIC's write to all devices of the process, once the CPU has seen its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdmaWrites {
    /// Visible at once.
    Ordered,
    /// Visible after [`Context::flush_rdma_writes`].
    Flushed,
    /// Unknown: the driver orders the writes for the device's owner at most, and cannot flush them from the host.
    Unordered,
}

impl RdmaWrites {
    /// Visibility by the device attributes `GPU_DIRECT_RDMA_WRITES_ORDERING` and
    /// `GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`.
    pub(crate) fn of_attributes(ordering: u32, options: u32) -> Self {
        use CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES as ALL;
        use CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as HOST;
        match (ordering, options) {
            (ordering, _) if ordering >= ALL as u32 => Self::Ordered,
            (_, options) if options & HOST as u32 != 0 => Self::Flushed,
            _ => Self::Unordered,
        }
    }
}

impl Context {
    /// Waits until the writes of NICs into memory of the device that completed before this call are visible to all
    /// devices. The driver's call has no deadline.
    ///
    /// # Errors
    ///
    /// Errors of CUDA: the device must be [`RdmaWrites::Flushed`] or [`RdmaWrites::Ordered`].
    pub fn flush_rdma_writes(&self) -> Result<()> {
        use CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES as ALL;
        use CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX as CURRENT;
        let _bound = self.enter()?;
        // SAFETY: takes two numbers, and the context is current.
        unsafe { call!(self.driver, cuFlushGPUDirectRDMAWrites(CURRENT, ALL)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_that_the_platform_does_not_order_for_all_devices_are_flushed() {
        for (ordering, options, expected) in [
            (0, 0, RdmaWrites::Unordered),
            (0, 1, RdmaWrites::Flushed),
            // Waits of streams alone.
            (0, 2, RdmaWrites::Unordered),
            (100, 3, RdmaWrites::Flushed),
            (100, 0, RdmaWrites::Unordered),
            (200, 0, RdmaWrites::Ordered),
            (200, 3, RdmaWrites::Ordered),
        ] {
            assert_eq!(RdmaWrites::of_attributes(ordering, options), expected);
        }
    }
}
