//! Allocation size check.

use crate::error::{Error, Result};

/// Rejects empty allocations with a uniform error.
pub(super) fn check_size(what: &'static str, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Err(Error::Size { what, bytes, problem: "expected at least 1" });
    }
    Ok(())
}
