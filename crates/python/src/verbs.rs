//! RDMA device ports on this machine, for `weft doctor`.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use weft_fabric::providers::VerbsChoice;
use weft_fabric::providers::verbs::{self, PortReport};

/// This process's libibverbs and its device ports, with the GIDs that `WEFT_VERBS_GID_INDEX` selects.
/// Loads the library if it is not loaded yet, and opens each device.
#[pyfunction]
pub fn verbs_report(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let (library, dma_buf, ports) = py.detach(|| {
        // The provider's row reports an invalid variable.
        let choice = VerbsChoice::from_env().unwrap_or_default();
        (verbs::library(), verbs::registers_dma_bufs(), verbs::ports(&choice))
    });
    let answer = PyDict::new(py);
    answer.set_item("library", library.ok().map(|path| path.to_string_lossy().into_owned()))?;
    answer.set_item("dma_buf", dma_buf)?;
    answer.set_item("error", ports.as_ref().err())?;
    let ports = ports.unwrap_or_default();
    let ports = ports.iter().map(|port| describe(py, port)).collect::<PyResult<Vec<_>>>();
    answer.set_item("ports", ports?)?;
    Ok(answer)
}

fn describe<'py>(py: Python<'py>, port: &PortReport) -> PyResult<Bound<'py, PyDict>> {
    let [completions, requests, receives] = port.limits;
    let answer = PyDict::new(py);
    answer.set_item("name", &port.name)?;
    answer.set_item("device", &port.device)?;
    answer.set_item("unusable", &port.unusable)?;
    answer.set_item("state", port.state)?;
    answer.set_item("link_layer", port.link_layer)?;
    answer.set_item("gigabits", port.rate.map(|rate| f64::from(rate) / 1000.0))?;
    answer.set_item("gid", &port.gid)?;
    answer.set_item("gid_entries", port.gid_entries)?;
    answer.set_item("mtu", port.mtu)?;
    answer.set_item("max_message", port.max_message)?;
    answer.set_item("firmware", &port.firmware)?;
    answer.set_item("max_completions", completions)?;
    answer.set_item("max_requests", requests)?;
    answer.set_item("max_receives", receives)?;
    answer.set_item("on_demand_paging", port.on_demand_paging)?;
    Ok(answer)
}
