//! `DeviceAllToAll` options, which weft-moe declares, from Python's keyword arguments.

use crate::choices::choose;
use crate::errors::{Error, raise};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyString, PyTuple};
use weft_gpu::{MemoryKind, MemoryLocation};
use weft_moe::Error as MoeError;
use weft_moe::device::{Keywords, OptionError, OptionValue, Options};

/// Device all-to-all option names, as `weft.moe.options.Options` has them; a test compares.
#[pyfunction]
pub fn device_options() -> Vec<&'static str> {
    weft_moe::device::keywords().into_iter().map(|keyword| keyword.name).collect()
}

/// The options that keyword arguments pass.
///
/// # Errors
/// `TypeError` for an option that is missing or unknown or has another type; `ConfigurationError` for a value without
/// meaning.
pub fn options_of(py: Python<'_>, arguments: Option<&Bound<'_, PyDict>>) -> PyResult<Options> {
    let mut given = Keywords::new();
    for (name, value) in arguments.into_iter().flatten() {
        given.insert(name.extract()?, option_value(&value)?);
    }
    Options::read(&given).map_err(|refusal| match refusal {
        OptionError::InvalidValue(message) => raise(py, "ConfigurationError", &message),
        OptionError::InvalidType(message) => PyTypeError::new_err(message),
    })
}

/// A Python value, whatever it is.
fn option_value(value: &Bound<'_, PyAny>) -> PyResult<OptionValue> {
    if value.is_none() {
        return Ok(OptionValue::None);
    }
    if value.is_instance_of::<PyBool>() {
        return Ok(OptionValue::Flag(value.extract()?));
    }
    if value.is_instance_of::<PyString>() {
        return Ok(OptionValue::Text(value.extract()?));
    }
    if let Ok(pair) = value.cast::<PyTuple>()
        && let Ok((dtype, block)) = pair.extract::<(String, Bound<'_, PyAny>)>()
    {
        return Ok(OptionValue::Scales(dtype, Box::new(option_value(&block)?)));
    }
    if value.is_instance_of::<PyInt>() || (!value.is_instance_of::<PyFloat>() && has_index(value)) {
        return Ok(value
            .extract()
            .map_or_else(|_| OptionValue::LargeInteger(shown(value)), OptionValue::Integer));
    }
    Ok(match value.extract() {
        Ok(number) => OptionValue::Float(number),
        Err(_) => OptionValue::Unsupported(value.get_type().name()?.extract()?),
    })
}

/// True for an integer from another library, such as numpy's.
fn has_index(value: &Bound<'_, PyAny>) -> bool {
    value.hasattr("__index__").unwrap_or(false)
}

fn shown(value: &Bound<'_, PyAny>) -> String {
    // Python does not print numbers with more than some thousand digits.
    value.str().map_or_else(|_| "(too many digits)".to_owned(), |text| text.to_string())
}

/// A rank's memory location: on `device`, such as "cuda:0", or "twin", with the given sharing kind.
pub fn memory_location(
    py: Python<'_>,
    device: &str,
    memory: MemoryKind,
) -> PyResult<MemoryLocation> {
    match (device, device.strip_prefix("cuda:").map(str::parse)) {
        ("twin", _) => Ok(MemoryLocation::Twin),
        (_, Some(Ok(ordinal))) => {
            let device = py.detach(|| weft_cuda::driver()?.device(ordinal));
            let device = device.map_err(MoeError::from).map_err(Error::from)?;
            Ok(MemoryLocation::Cuda { device, memory })
        }
        _ => {
            let message = format!("device {device:?}: expected twin, or cuda:0 and on");
            Err(raise(py, "ConfigurationError", &message))
        }
    }
}

/// Memory sharing kind.
pub fn memory_kind(py: Python<'_>, name: &str) -> PyResult<MemoryKind> {
    choose(py, "memory", name, &[("fd", MemoryKind::Fd), ("ipc", MemoryKind::Ipc)])
}
