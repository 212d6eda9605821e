//! Part location (GPU or CPU) and memory kind.

use weft_cuda::Device;

/// Heap memory allocation and sharing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Driver virtual memory, shared by file descriptor.
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

/// Memory location on a rank.
#[derive(Clone, Copy, Debug)]
pub enum MemoryLocation {
    /// On a GPU.
    Cuda {
        /// The GPU.
        device: Device,
        /// Memory kind: `Fd` or `Ipc`.
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
