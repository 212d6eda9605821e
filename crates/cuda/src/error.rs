//! CUDA and CUDA library errors, worded for the user.

use std::fmt::Display;

/// This crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// CUDA error, with a remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Missing or unloadable library.
    #[error("{library} cannot be loaded ({why}): {remedy}")]
    Absent {
        /// Library.
        library: &'static str,
        /// Loader messages for each attempted name.
        why: String,
        /// Remedy.
        remedy: &'static str,
    },
    /// Library without a required function.
    #[error("{library} has no {function}: expected {needs}; install a newer version")]
    TooOld {
        /// Library.
        library: &'static str,
        /// Function.
        function: &'static str,
        /// Oldest sufficient version.
        needs: &'static str,
    },
    /// Failed call.
    #[error("{call} failed: {text} ({name}, {code}){}", then(.remedy))]
    Call {
        /// Function.
        call: &'static str,
        /// Result code.
        code: u32,
        /// Result name.
        name: String,
        /// Description by CUDA.
        text: String,
        /// Remedy; empty if unknown.
        remedy: &'static str,
    },
    /// Ordinal beyond the visible devices.
    #[error(
        "CUDA device {ordinal}: {count} are visible to this process; check CUDA_VISIBLE_DEVICES"
    )]
    NoDevice {
        /// Requested ordinal.
        ordinal: u32,
        /// Visible device count.
        count: u32,
    },
    /// Address outside device memory.
    #[error(
        "address {address:#x}: expected memory of a CUDA device; pass memory of the CPU as a numpy array"
    )]
    NotOfDevice {
        /// Address.
        address: u64,
    },
    /// Unsupported device operation.
    #[error("{device} cannot {what}: {remedy}")]
    Unsupported {
        /// Device name.
        device: String,
        /// Unsupported operation.
        what: &'static str,
        /// Alternative.
        remedy: &'static str,
    },
    /// Invalid size.
    #[error("{bytes} bytes of {what}: {problem}")]
    Size {
        /// Memory kind.
        what: &'static str,
        /// Byte count.
        bytes: usize,
        /// Problem.
        problem: &'static str,
    },
    /// Text with a NUL byte: a name, an option or a source.
    #[error("{what} {text:?}: expected text without NUL bytes")]
    Text {
        /// Text kind.
        what: &'static str,
        /// First characters.
        text: String,
    },
    /// GDRCopy's driver is missing, or refuses this process.
    #[error(
        "GDRCopy's driver (/dev/gdrdrv) cannot be opened ({why}): load the module (modprobe gdrdrv), and give containers \
         the device"
    )]
    NoGdrDriver {
        /// Reason.
        why: String,
    },
    /// GPU memory that GDRCopy does not map as asked.
    #[error("GPU memory at {address:#x} cannot be mapped by GDRCopy: {problem}")]
    NotMapped {
        /// Address.
        address: u64,
        /// Problem.
        problem: &'static str,
    },
    /// Invalid cubin.
    #[error("{bytes} bytes are not a cubin ({problem}): compile the kernel again")]
    Cubin {
        /// Byte count.
        bytes: usize,
        /// Problem.
        problem: &'static str,
    },
    /// Compilation error.
    #[error("{name} does not compile with {}: {text}\n{log}", .options.join(" "))]
    Compile {
        /// Source name.
        name: String,
        /// Compiler options.
        options: Vec<String>,
        /// NVRTC result.
        text: String,
        /// NVRTC log.
        log: String,
    },
    /// Failed operation on a file descriptor of device memory.
    #[error("file descriptor of device memory: {0}; check the limit of open files (ulimit -n)")]
    Descriptor(String),
}

/// Message suffix: the remedy, if any.
fn then(remedy: &&'static str) -> impl Display {
    if remedy.is_empty() { String::new() } else { format!("; {remedy}") }
}

impl Error {
    /// Result code from a failed call.
    pub fn code(&self) -> Option<u32> {
        match self {
            Self::Call { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// Remedy for a driver result code; empty if unknown.
pub(crate) fn remedy(code: u32) -> &'static str {
    match code {
        2 => {
            "other processes or the cache of PyTorch occupy the device memory: \
             torch.cuda.empty_cache() frees the cache"
        }
        3 => {
            "CUDA is unusable after a fork: start the ranks with spawn, or before the first use of CUDA"
        }
        34 => "the stub of the toolkit was loaded: remove its folder from LD_LIBRARY_PATH",
        46 => "another process uses the device exclusively: `nvidia-smi -c 0` permits sharing",
        100 => {
            "no GPU is visible: check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and the GPUs of the \
             container"
        }
        101 | 217 => {
            "the devices have no peer access (MIG slices never have): `weft doctor` lists those \
             that have"
        }
        201 => {
            "no context is current on this thread, or it was destroyed; or a process opened its own \
             IPC handle"
        }
        209 | 218 | 222 => "the kernel was compiled for another device: clear the cache of kernels",
        304 => {
            "the system rejected sharing of the memory: run the ranks under one user, on one \
             host, with the same driver"
        }
        700 | 701 | 702 | 710 | 715..=719 => {
            "a kernel failed, possibly an earlier one: CUDA_LAUNCH_BLOCKING=1 shows which; restart the \
             process"
        }
        801 => "unsupported by the device, the driver or the virtual machine: see `weft doctor`",
        800 => "the container or the system forbids it: check its permissions",
        802 => "machines with NVSwitch need the service nvidia-fabricmanager: start it",
        803 => "the driver was updated while it was loaded: restart the machine",
        900..=908 => "a CUDA graph is being captured, which this call does not allow",
        999 => {
            "the driver is in an error state: check the kernel log (dmesg), or restart the machine"
        }
        _ => "",
    }
}
