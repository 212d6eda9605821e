//! NIC write visibility in device memory.
//!
//! A NIC reports a write in host memory, while the bytes are on the way to a device. The driver reports whether
//! the platform orders the two, and can wait for the bytes where it does not.

use cudarc::driver::sys::{CUGPUDirectRDMAWritesOrdering, CUflushGPUDirectRDMAWritesOptions};

/// Reader of what NICs write into a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reader {
    /// Only work on the device that holds the memory, such as a kernel there.
    Owner,
    /// Also other devices, such as peers over NVLink, and the CPU.
    #[default]
    All,
}

/// The driver's answers about NIC writes into a device's memory.
#[derive(Clone, Copy)]
pub(crate) struct RdmaAttributes {
    /// `GPU_DIRECT_RDMA_WRITES_ORDERING`.
    pub(crate) ordering: u32,
    /// `GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`.
    pub(crate) flush_options: u32,
}

/// A NIC write's visibility to a [`Reader`], once the CPU has seen the completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdmaWrites {
    /// Visible at once.
    Ordered,
    /// Visible after [`Context::flush_rdma_writes`](crate::Context::flush_rdma_writes).
    Flushed,
    /// Unknown: the driver neither orders the writes for this reader nor flushes them from the host.
    Unordered,
}

impl RdmaAttributes {
    /// Visibility to a reader.
    pub(crate) fn writes(self, reader: Reader) -> RdmaWrites {
        use CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES as ALL;
        use CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as OWNER;
        use CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as HOST;
        let least = match reader {
            Reader::Owner => OWNER,
            Reader::All => ALL,
        };
        match self {
            Self { ordering, .. } if ordering >= least as u32 => RdmaWrites::Ordered,
            Self { flush_options, .. } if flush_options & HOST as u32 != 0 => RdmaWrites::Flushed,
            _ => RdmaWrites::Unordered,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_that_the_platform_does_not_order_for_all_devices_are_flushed() {
        for (ordering, flush_options, expected) in [
            (0, 0, RdmaWrites::Unordered),
            (0, 1, RdmaWrites::Flushed),
            // Stream waits only.
            (0, 2, RdmaWrites::Unordered),
            (100, 3, RdmaWrites::Flushed),
            (100, 0, RdmaWrites::Unordered),
            (200, 0, RdmaWrites::Ordered),
            (200, 3, RdmaWrites::Ordered),
        ] {
            let attributes = RdmaAttributes { ordering, flush_options };
            assert_eq!(attributes.writes(Reader::All), expected);
            assert_eq!(attributes.writes(Reader::default()), expected);
        }
    }

    #[test]
    fn writes_that_the_platform_orders_for_the_owner_need_no_flush_there() {
        for (ordering, flush_options, expected) in [
            (0, 0, RdmaWrites::Unordered),
            (0, 1, RdmaWrites::Flushed),
            (100, 0, RdmaWrites::Ordered),
            (100, 3, RdmaWrites::Ordered),
            (200, 0, RdmaWrites::Ordered),
        ] {
            let attributes = RdmaAttributes { ordering, flush_options };
            assert_eq!(attributes.writes(Reader::Owner), expected);
        }
    }
}
