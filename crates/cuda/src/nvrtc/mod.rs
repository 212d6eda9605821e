//! NVRTC: CUDA's compiler for kernels, at run time.

mod find;
mod program;
#[cfg(test)]
mod tests;

pub use find::add_search_path;
pub use program::{Source, compile};

use crate::error::Result;
use std::path::PathBuf;

/// NVRTC's version, as in `(13, 0)`.
///
/// # Errors
///
/// [`Error::Absent`](crate::Error::Absent) where there is none.
pub fn version() -> Result<(u32, u32)> {
    Ok(find::nvrtc()?.version)
}

/// The file that NVRTC was loaded from.
///
/// # Errors
///
/// [`Error::Absent`](crate::Error::Absent) where there is none.
pub fn location() -> Result<PathBuf> {
    Ok(find::nvrtc()?.location.clone())
}
