//! NVRTC: CUDA's run-time kernel compiler.
//!
//! - `find.rs`: search and loading; `program.rs`: compilation

mod find;
mod program;
#[cfg(test)]
mod tests;

pub use find::add_search_path;
pub use program::{Source, compile};

use crate::error::Result;
use std::path::PathBuf;

/// NVRTC version, for example `(13, 0)`.
///
/// # Errors
///
/// [`Error::Absent`](crate::Error::Absent) without NVRTC.
pub fn version() -> Result<(u32, u32)> {
    Ok(find::nvrtc()?.version)
}

/// File from which NVRTC was loaded.
///
/// # Errors
///
/// [`Error::Absent`](crate::Error::Absent) without NVRTC.
pub fn location() -> Result<PathBuf> {
    Ok(find::nvrtc()?.location.clone())
}
