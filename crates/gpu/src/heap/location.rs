//! Location of a part (GPU or CPU) and kind of its memory.

use weft_cuda::Device;

/// Allocation and sharing of a heap's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Virtual memory of the driver, shared by file descriptor.
    Fd,
    /// `cuMemAlloc`, shared by IPC handle.
    Ipc,
    /// Memory file on the CPU, mapped by all ranks.
    Twin,
}

impl MemoryKind {
    pub(super) fn number(self) -> u8 {
        match self {
            MemoryKind::Fd => 0,
            MemoryKind::Ipc => 1,
            MemoryKind::Twin => 2,
        }
    }

    pub(super) fn from_number(number: u8) -> Option<MemoryKind> {
        [MemoryKind::Fd, MemoryKind::Ipc, MemoryKind::Twin]
            .into_iter()
            .find(|kind| kind.number() == number)
    }
}

impl std::fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MemoryKind::Fd => "fd",
            MemoryKind::Ipc => "ipc",
            MemoryKind::Twin => "twin",
        })
    }
}

/// Location of a rank's part.
#[derive(Clone, Copy, Debug)]
pub enum MemoryLocation {
    /// On a GPU.
    Cuda {
        /// The GPU.
        device: Device,
        /// Kind of its memory: `Fd` or `Ipc`.
        memory: MemoryKind,
    },
    /// On the CPU.
    Twin,
}

impl MemoryLocation {
    pub(super) fn memory(&self) -> MemoryKind {
        match self {
            MemoryLocation::Cuda { memory, .. } => *memory,
            MemoryLocation::Twin => MemoryKind::Twin,
        }
    }
}
