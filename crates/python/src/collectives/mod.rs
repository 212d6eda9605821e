//! Collectives and messages of a communicator as a table of C functions, for libraries that are bound to other
//! interfaces than Python's: the backend of torch.distributed (`python/weft/torch/shim`).
//!
//! - `table`: the functions; `operations`: their operations by number, waits, composition from messages
//! - `status`: codes and texts of errors

mod operations;
mod status;
mod table;

use crate::communicator::Communicator;
use crate::shared::deadline;
use operations::Operations;
use pyo3::prelude::*;

/// Connects collectives over a communicator. Every rank calls this.
///
/// Returns the addresses of the table and of the context for its functions. The table belongs to the context, which
/// its function `release` frees.
#[pyfunction]
pub fn collectives_table(
    py: Python<'_>,
    communicator: &Communicator,
    timeout: f64,
) -> PyResult<(usize, usize)> {
    let shared = &communicator.shared;
    let operations = shared
        .with(py, |fabric| Ok(Operations::connect(fabric, shared.clone(), deadline(timeout))?))?;
    Ok(table::lend(operations))
}
