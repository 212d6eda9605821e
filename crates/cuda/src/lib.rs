//! CUDA, loaded at run time: driver, kernel compiler (NVRTC), NVML and GDRCopy.
//!
//! No library is linked. On a machine without CUDA the crate compiles and loads, and [`driver`] returns an error
//! that names the missing library; all other types need a driver.
//!
//! - [`driver`], [`Driver`], [`Device`]: driver and devices on this machine
//! - [`device_of_rank`]: the device that a rank probably uses
//! - [`Context`]: a device's primary context, shared with PyTorch
//! - [`DeviceMemory`] and [`PeerMemory`] (by IPC handle), [`VirtualMemory`] (by file descriptor),
//!   [`PinnedMemory`] and [`RegisteredMemory`] (on the host): memory, and sharing between processes
//! - [`DmaBuf`]: device memory for NICs; [`RdmaWrites`]: visibility to a [`Reader`] of what they write there;
//!   [`device_of`]: the device for an address
//! - [`Stream`], [`OwnedStream`], [`Event`], [`copy_async`], [`copy_rows_async`], [`set_bytes_async`],
//!   [`stream_write_value32`]: ordered work
//! - [`Module`], [`Function`]: kernels
//! - [`RelaxedCapture`], [`Relaxed`]: calls on Weft's threads while PyTorch captures a graph
//! - [`nvrtc`]: compiles source to cubin; [`nvml`]: MIG mode and NVLink
//! - [`gdr`]: words in GPU memory that the host stores to
//! - [`report`]: summary for `weft doctor`
//!
//! Methods make a context current and restore the caller's, so that the caller's current device is unchanged.
//! Functions on streams use the current context: see [`Context::bind`] and [`Context::enter`].

mod capture;
mod context;
mod device;
mod driver;
mod error;
mod event;
pub mod gdr;
mod library;
mod memory;
mod module;
pub mod nvml;
pub mod nvrtc;
mod properties;
mod rank_device;
pub mod report;
mod rows;
mod stream;

pub use capture::{Relaxed, RelaxedCapture};
pub use context::{Bound, Context};
pub use device::Device;
pub use driver::{Driver, driver};
pub use error::{Error, Result};
pub use event::{Event, stream_wait};
pub use memory::{
    DeviceMemory, DmaBuf, IpcHandle, PeerMemory, PinnedMemory, RdmaWrites, Reader,
    RegisteredMemory, VirtualMemory, device_of, is_ipc_capable,
};
pub use module::{Function, Module, Start};
pub use rank_device::{LocalRank, NoRankDevice, RankDevice, device_of_rank};
pub use rows::{Direction, Rows, copy_rows_async};
pub use stream::{
    OwnedStream, Stream, copy_async, is_capturing, set_bytes_async, stream_synchronize,
    stream_write_value32,
};
