//! Choice of routes that have slots.

use super::super::copy::CopyBackend;
use std::path::Path;

/// Choice of providers whose routes carry GPU memory through slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Staging {
    /// No provider. Peers that stage GPU memory still reach this rank's host memory.
    Never,
    /// Tcp, on routes where this end or the other has GPUs.
    Automatic(CopyBackend),
    /// Every provider but copy. The same choice on all ranks.
    Always(CopyBackend),
}

impl Default for Staging {
    /// [`Staging::Automatic`] with CUDA's copy engines.
    fn default() -> Staging {
        Staging::Automatic(CopyBackend::default())
    }
}

/// Condition for slots on a route. A route has slots if both ends stage and one of them has GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StagedMode {
    /// This end has no slots.
    Never,
    /// This end has slots, and may have GPUs.
    Automatic {
        /// This end may register GPU memory.
        has_gpus: bool,
    },
    /// This end has slots and GPUs.
    Always,
}

impl StagedMode {
    /// This end can have slots.
    pub(super) fn stages(self) -> bool {
        self != StagedMode::Never
    }

    /// This end may register GPU memory.
    pub(super) fn has_gpus(self) -> bool {
        matches!(self, StagedMode::Always | StagedMode::Automatic { has_gpus: true })
    }
}

/// True if this host has such GPUs, as far as device files show it: CUDA is not loaded for this.
pub fn has_gpus(engines: CopyBackend) -> bool {
    // Linux, and Linux under Windows.
    let files = ["/dev/nvidiactl", "/dev/dxg"];
    engines != CopyBackend::Cuda || files.iter().any(|file| Path::new(file).exists())
}
