//! NICs by GPU on this machine, for `weft doctor`.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use weft_fabric::{NicReport, ProviderNics};

/// This host's NICs by GPU, as the providers verbs and ofi choose them. Loads libibverbs, libfabric and the CUDA driver.
/// `copy`: the host whose `/sys` is in this folder, with these active ports and libfabric domains.
#[pyfunction]
#[pyo3(signature = (copy = None))]
pub fn nic_report(
    py: Python<'_>,
    copy: Option<(PathBuf, Vec<String>, Vec<String>)>,
) -> PyResult<Bound<'_, PyDict>> {
    let report = py.detach(|| match copy {
        Some((root, ports, domains)) => NicReport::of_copy(&root, ports, domains),
        None => NicReport::of_host(),
    });
    let answer = PyDict::new(py);
    answer.set_item("rank_gpu", &report.rank_gpu)?;
    answer.set_item("verbs", describe(py, &report.verbs)?)?;
    answer.set_item("ofi", describe(py, &report.ofi)?)?;
    Ok(answer)
}

fn describe<'py>(py: Python<'py>, nics: &ProviderNics) -> PyResult<Bound<'py, PyDict>> {
    let answer = PyDict::new(py);
    answer.set_item("named", &nics.named)?;
    answer.set_item("error", &nics.error)?;
    let gpus = nics.gpus.iter().map(|it| (&it.gpu, &it.address, &it.nics, &it.reason));
    answer.set_item("gpus", gpus.collect::<Vec<_>>())?;
    Ok(answer)
}
