//! CUDA on this machine: driver, devices, NVML, NVRTC and GDRCopy, for `weft doctor`.

use crate::errors::Error as Raised;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use weft_cuda::report::{self, DeviceReport};
use weft_cuda::{Device, Error, nvrtc};

/// CUDA on this machine. NVRTC is also searched for in these folders.
#[pyfunction]
#[pyo3(signature = (nvrtc_folders = Vec::new()))]
pub fn cuda_report(py: Python<'_>, nvrtc_folders: Vec<PathBuf>) -> PyResult<Bound<'_, PyDict>> {
    nvrtc_folders.into_iter().for_each(nvrtc::add_search_path);
    let found = py.detach(report::query);
    let (answer, errors) = (PyDict::new(py), PyDict::new(py));
    let driver = value_or_error("driver", found.driver, &errors)?;
    answer.set_item("driver", driver.map(|version| (version / 1000, version % 1000 / 10)))?;
    let devices = value_or_error("devices", found.devices, &errors)?.unwrap_or_default();
    let devices = devices.iter().map(|device| describe(py, device)).collect::<PyResult<Vec<_>>>();
    answer.set_item("devices", devices?)?;
    answer.set_item("nvml", value_or_error("nvml", found.nvml, &errors)?)?;
    let nvrtc = value_or_error("nvrtc", found.nvrtc, &errors)?;
    let nvrtc = nvrtc.map(|(version, file)| (version, file.to_string_lossy().into_owned()));
    answer.set_item("nvrtc", nvrtc)?;
    answer.set_item("gdrcopy", value_or_error("gdrcopy", found.gdrcopy, &errors)?.is_some())?;
    answer.set_item("errors", errors)?;
    Ok(answer)
}

/// Ordinal for the CUDA device that owns the memory at an address.
#[pyfunction]
pub fn cuda_device_of(address: u64) -> PyResult<u32> {
    let device = weft_cuda::device_of(address);
    Ok(device.map_err(|error| Raised::from(weft_moe::Error::Cuda(error)))?)
}

/// The value found; `None` with an entry in `errors` otherwise.
fn value_or_error<T>(
    name: &str,
    found: Result<T, Error>,
    errors: &Bound<'_, PyDict>,
) -> PyResult<Option<T>> {
    found.map(Some).or_else(|error| {
        errors.set_item(name, report::brief(&error))?;
        Ok(None)
    })
}

fn describe<'py>(py: Python<'py>, report: &DeviceReport) -> PyResult<Bound<'py, PyDict>> {
    let device = report.device;
    let answer = PyDict::new(py);
    answer.set_item("ordinal", device.ordinal())?;
    answer.set_item("name", device.name())?;
    answer.set_item("uuid", uuid(device))?;
    answer.set_item("bus_id", device.bus_id())?;
    answer.set_item("compute_capability", device.compute_capability())?;
    answer.set_item("sm_count", device.sm_count())?;
    answer.set_item("memory_bytes", device.memory_bytes())?;
    answer.set_item("mig_slice", device.is_mig())?;
    answer.set_item("mig_mode", report.mig_mode)?;
    answer.set_item("file_descriptors", device.can_share_fds())?;
    answer.set_item("reaches", &report.reaches)?;
    answer.set_item("nvlink", &report.nvlink)?;
    Ok(answer)
}

/// Device UUID as `nvidia-smi -L` prints it: for example, `GPU-` and 36 characters.
fn uuid(device: Device) -> String {
    let digits = device.uuid().map(|byte| format!("{byte:02x}")).concat();
    let kind = if device.is_mig() { "MIG" } else { "GPU" };
    let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    format!("{kind}-{}", parts.join("-"))
}
