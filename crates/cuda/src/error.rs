//! Everything that can go wrong here, worded for the user.

use std::fmt::Display;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A library is not on this machine, or cannot be loaded.
    #[error("{library} is not here ({why}): {remedy}")]
    Absent {
        /// The library.
        library: &'static str,
        /// What was tried, and what the loader said.
        why: String,
        /// What to install.
        remedy: &'static str,
    },
    /// A library lacks a function that Weft calls.
    #[error("{library} has no {function}: it is too old for Weft, which needs {needs}")]
    TooOld {
        /// The library.
        library: &'static str,
        /// The function.
        function: &'static str,
        /// The oldest version that has everything.
        needs: &'static str,
    },
    /// A call failed.
    #[error("{call} failed: {text} ({name}, {code}){}", then(.remedy))]
    Call {
        /// The function.
        call: &'static str,
        /// Its result.
        code: u32,
        /// CUDA's name of the result.
        name: String,
        /// CUDA's text for it.
        text: String,
        /// What to do, where that is known; else empty.
        remedy: &'static str,
    },
    /// A device that there is not.
    #[error(
        "there is no CUDA device {ordinal}: {count} are visible here; look at CUDA_VISIBLE_DEVICES"
    )]
    NoDevice {
        /// The number that was asked for.
        ordinal: u32,
        /// How many devices there are.
        count: u32,
    },
    /// An address that is no device's.
    #[error(
        "address {address:#x}: expected memory of a CUDA device; pass memory of the CPU as a numpy array"
    )]
    NotOfDevice {
        /// The address.
        address: u64,
    },
    /// A device cannot do what is asked of it.
    #[error("{device} cannot {what}: {remedy}")]
    Unsupported {
        /// The device's name.
        device: String,
        /// What it cannot do.
        what: &'static str,
        /// What to use instead.
        remedy: &'static str,
    },
    /// A size that cannot be.
    #[error("{bytes} bytes of {what} cannot be had: {problem}")]
    Size {
        /// What was to be allocated or moved.
        what: &'static str,
        /// How many bytes of it.
        bytes: usize,
        /// Why not.
        problem: &'static str,
    },
    /// A name, an option or a source text that C cannot take.
    #[error("{what} {text:?} holds a byte 0, which CUDA cannot take: leave it out")]
    Text {
        /// What it is.
        what: &'static str,
        /// Its beginning.
        text: String,
    },
    /// What is to be loaded as a kernel's code is none.
    #[error("{bytes} bytes are not a cubin ({problem}): compile the kernel anew")]
    Cubin {
        /// How many bytes there are.
        bytes: usize,
        /// What is wrong with them.
        problem: &'static str,
    },
    /// A kernel does not compile.
    #[error("{name} does not compile with {}: {text}\n{log}", .options.join(" "))]
    Compile {
        /// The source's name.
        name: String,
        /// The options that it was compiled with.
        options: Vec<String>,
        /// NVRTC's word for what is wrong.
        text: String,
        /// NVRTC's log.
        log: String,
    },
    /// The system refused something about a file descriptor of ours.
    #[error("a file descriptor of device memory: {0}; look at the limit of open files (ulimit -n)")]
    Descriptor(String),
}

/// A remedy behind a message.
fn then(remedy: &&'static str) -> impl Display {
    if remedy.is_empty() { String::new() } else { format!("; {remedy}") }
}

impl Error {
    /// CUDA's number of the error, if a call failed.
    pub fn code(&self) -> Option<u32> {
        match self {
            Self::Call { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// What to do about an error of the driver's, or nothing.
pub(crate) fn remedy(code: u32) -> &'static str {
    match code {
        2 => {
            "other processes, and PyTorch's cache, hold the device's memory: \
             torch.cuda.empty_cache() gives the cache back"
        }
        3 => "CUDA does not survive a fork: start the ranks with spawn, or before CUDA is used",
        34 => "the toolkit's stub was loaded: take its folder out of LD_LIBRARY_PATH",
        46 => "another process has the device for itself: `nvidia-smi -c 0` lets it be shared",
        100 => {
            "no GPU is visible: look at `nvidia-smi`, at CUDA_VISIBLE_DEVICES, and whether the \
             container was given its GPUs"
        }
        101 | 217 => {
            "the devices do not reach each other's memory (with MIG none do): `weft doctor` says \
             which can"
        }
        201 => {
            "no context is current on this thread, or the context is gone; a process cannot open \
             its own IPC handle either"
        }
        209 | 218 | 222 => "the kernel was built for another device: clear the cache of kernels",
        304 => {
            "the system refused to share the memory: the ranks must run under one user, on one \
             host, with the same driver"
        }
        700 | 701 | 702 | 710 | 715..=719 => {
            "a kernel failed, perhaps an earlier one: CUDA_LAUNCH_BLOCKING=1 shows which; the \
             process must be started anew"
        }
        801 => "the device, the driver or a virtual machine around them cannot: see `weft doctor`",
        800 => "the container or the system forbids it: look at its permissions",
        802 => "machines with NVSwitch need the service nvidia-fabricmanager to run: start it",
        803 => "the driver was updated while it was loaded: restart the machine",
        900..=908 => "a CUDA graph is being captured, which this call does not allow",
        999 => "the driver is in a bad state: look at the kernel's log (dmesg), or restart",
        _ => "",
    }
}
