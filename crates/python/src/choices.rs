//! A program's choices by name.

use crate::errors::raise;
use pyo3::prelude::*;

/// A known name's value.
///
/// # Errors
/// `ConfigurationError` for another name.
pub fn choose<T: Copy>(py: Python<'_>, what: &str, name: &str, known: &[(&str, T)]) -> PyResult<T> {
    if let Some((_, value)) = known.iter().find(|(known, _)| *known == name) {
        return Ok(*value);
    }
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    let message = format!("{what} is {name:?}: {} are known", names.join(" and "));
    Err(raise(py, "ConfigurationError", &message))
}
