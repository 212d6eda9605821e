//! libfabric providers on this machine, for `weft doctor`.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::net::{IpAddr, Ipv4Addr};
use weft_fabric::providers::OfiProvider;
use weft_fabric::providers::ofi::{self, Offer};

/// This process's libfabric, and its domains for each provider given. Loads the library if it is not
/// loaded yet; opens no NIC.
#[pyfunction]
pub fn ofi_report(py: Python<'_>, providers: Vec<String>) -> PyResult<Bound<'_, PyDict>> {
    let anywhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let (library, built_in, found) = py.detach(|| {
        let offered = providers.iter().map(|name| ofi::offers(&OfiProvider::new(name), anywhere));
        let offered: Vec<_> = offered.collect();
        (ofi::library(), ofi::built_in(), offered)
    });
    let (answer, listed) = (PyDict::new(py), PyDict::new(py));
    answer.set_item("error", library.as_ref().err())?;
    let (path, version) = library.ok().unzip();
    answer.set_item("library", path.map(|path| path.to_string_lossy().into_owned()))?;
    answer.set_item("version", version)?;
    answer.set_item("built_in", built_in.unwrap_or_default())?;
    for (name, offers) in providers.iter().zip(found) {
        let provider = PyDict::new(py);
        provider.set_item("error", offers.as_ref().err())?;
        let offers = offers.unwrap_or_default();
        let offers = offers.iter().map(|offer| describe(py, offer)).collect::<PyResult<Vec<_>>>();
        provider.set_item("offers", offers?)?;
        listed.set_item(name, provider)?;
    }
    answer.set_item("providers", listed)?;
    Ok(answer)
}

fn describe<'py>(py: Python<'py>, offer: &Offer) -> PyResult<Bound<'py, PyDict>> {
    let answer = PyDict::new(py);
    answer.set_item("domain", &offer.domain)?;
    answer.set_item("fabric", &offer.fabric)?;
    answer.set_item("max_part_bytes", offer.max_part_bytes)?;
    answer.set_item("max_ranges", offer.max_ranges)?;
    answer.set_item("registers_sources", offer.registers_sources)?;
    answer.set_item("consumes_receives", offer.consumes_receives)?;
    answer.set_item("progresses_by_itself", offer.progresses_by_itself)?;
    answer.set_item("reaches_devices", offer.reaches_devices)?;
    Ok(answer)
}
