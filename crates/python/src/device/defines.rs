//! Device sources and defines, for tests that compile kernels without a GPU.

use super::options::options_of;
use super::placement::{RankExperts, with_placement};
use crate::errors::Error;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use weft_gpu::jit::CompileRequest;
use weft_moe::device::{DeviceShape, PROGRAM, SOURCES};

/// Macro names and values for a shape.
#[pyfunction]
#[pyo3(signature = (ranks, *, placement=None, **options))]
pub fn device_defines(
    py: Python<'_>,
    ranks: u32,
    placement: Option<Vec<RankExperts>>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Vec<(String, String)>> {
    let config = with_placement(options_of(py, options)?.config(ranks, 0), placement)?;
    Ok(DeviceShape::new(config).map_err(Error::from)?.defines())
}

/// A program's name, and each file's path and text.
pub(super) type Source = (&'static str, Vec<(&'static str, &'static str)>, Vec<String>);

/// The program that has all kernels, and the compiler's options for an architecture but for the macros.
#[pyfunction]
pub fn device_source(arch: &str) -> Source {
    let request = CompileRequest::kernel(PROGRAM, SOURCES, arch);
    (request.name, request.sources().collect(), request.arguments())
}
