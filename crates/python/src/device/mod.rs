//! MoE dispatch and combine between GPUs for `weft.cuda`: addresses and streams in, launches out.
//!
//! A launch keeps the GIL and takes only a shared lock, which costs least; a call that can wait releases the GIL
//! first.

mod all_to_all;
mod calls;
mod collectives;
mod defines;
mod domain;
mod domains;
mod held;
mod options;
mod placement;
mod proxy;
mod registered;

pub use all_to_all::DeviceAllToAll;
pub use calls::DeviceCalls;
pub use collectives::{DeviceCollectives, compile_collectives, device_collectives_source};
pub use defines::{device_defines, device_source};
pub use domain::{SymmetricMemory, describe_arguments, table_fields};
pub use domains::Domains;
pub use options::device_options;
pub use proxy::DeviceProxy;
pub use registered::RegisteredMemory;

use pyo3::prelude::*;
use std::path::PathBuf;

/// Adds a directory to the search for NVRTC; before NVRTC's first use.
#[pyfunction]
pub fn add_nvrtc_directory(directory: PathBuf) {
    weft_cuda::nvrtc::add_search_path(directory);
}
