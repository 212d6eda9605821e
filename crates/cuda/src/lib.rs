//! CUDA, loaded at run time: the driver, the compiler for kernels (NVRTC), and NVML.
//!
//! Nothing here is linked with. On a machine without CUDA everything compiles and imports, and
//! [`driver`] says what is missing; so nothing else of this crate can be reached there.
//!
//! - [`driver`], [`Driver`], [`Device`]: what this machine has
//! - [`Context`]: a device's primary context, which PyTorch uses too
//! - [`DeviceMemory`] and [`PeerMemory`] (by IPC handle), [`VirtualMemory`] (by file descriptor),
//!   [`PinnedMemory`] and [`RegisteredMemory`] (the host's): memory, and how another process comes to it
//! - [`DmaBuf`]: a device's memory for NICs; [`device_of`]: the device that an address is of
//! - [`Stream`], [`OwnedStream`], [`Event`], [`copy_async`], [`set_bytes_async`],
//!   [`stream_write_value32`]: work in order
//! - [`Module`], [`Function`]: kernels
//! - [`RelaxedCapture`]: calls of a thread of ours while PyTorch captures a graph
//! - [`nvrtc`]: from source to cubin; [`nvml`]: whether GPUs are cut up, and how joined
//! - [`report`]: what `weft doctor` says of all this
//!
//! Methods make their context current and put the caller's back, so that the caller's current device
//! (which is the current context's) stays what it was. Functions on streams take the one that is
//! current: see [`Context::bind`] and [`Context::enter`].

mod capture;
mod context;
mod device;
mod driver;
mod error;
mod event;
mod library;
mod memory;
mod module;
pub mod nvml;
pub mod nvrtc;
pub mod report;
mod stream;

pub use capture::RelaxedCapture;
pub use context::{Bound, Context};
pub use device::Device;
pub use driver::{Driver, driver};
pub use error::{Error, Result};
pub use event::{Event, stream_wait};
pub use memory::{
    DeviceMemory, DmaBuf, IpcHandle, PeerMemory, PinnedMemory, RegisteredMemory, VirtualMemory,
    device_of,
};
pub use module::{Function, Module};
pub use stream::{
    OwnedStream, Stream, copy_async, is_capturing, set_bytes_async, stream_synchronize,
    stream_write_value32,
};
