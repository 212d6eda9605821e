//! What kernels are compiled from, for tests that compile them where there is no GPU.

use super::options::Options;
use crate::errors::Error;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use weft_gpu::jit::Request;
use weft_moe::device::{DeviceShape, PROGRAM, SOURCES};

/// Names and values of the macros of a shape.
#[pyfunction]
#[pyo3(signature = (ranks, **options))]
pub fn device_defines(
    py: Python<'_>,
    ranks: u32,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Vec<(String, String)>> {
    let config = Options::of(options)?.config(py, ranks, 0)?;
    Ok(DeviceShape::new(config).map_err(Error::from)?.defines())
}

/// A program's name, path and text of each file.
type Source = (&'static str, Vec<(&'static str, &'static str)>, Vec<String>);

/// The program that has all kernels, and the compiler's options for an architecture but for the macros.
#[pyfunction]
pub fn device_source(arch: &str) -> Source {
    let request = Request::kernel(PROGRAM, SOURCES, arch);
    (request.name, request.sources().collect(), request.arguments())
}
