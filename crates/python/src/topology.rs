//! Servers and networks for `weft topo`: JSON out, for Python to print.

use crate::errors::Error;
use crate::numbers::{Flow, Seed};
use pyo3::prelude::*;
use std::path::PathBuf;
use weft_topology::{Description, report};

/// The server below `root` (`/sys` or a copy), or in NCCL's XML, with what NVML adds.
#[pyfunction]
#[pyo3(signature = (root, xml = None, nvml = None))]
pub fn topology_host(
    py: Python<'_>,
    root: PathBuf,
    xml: Option<&str>,
    nvml: Option<&str>,
) -> PyResult<String> {
    Ok(py.detach(|| report::host_report(&root, xml, nvml)).map_err(Error::from)?)
}

/// A BiGraph's cabling, rank map in all forms, and network.
#[pyfunction]
#[pyo3(signature = (spec, hosts = None))]
pub fn topology_bigraph(
    py: Python<'_>,
    spec: &str,
    hosts: Option<Vec<String>>,
) -> PyResult<String> {
    Ok(py.detach(|| report::bigraph_report(spec, hosts.as_deref())).map_err(Error::from)?)
}

/// Host of each rank in HDRM's map: of all that have a place, or of this number of ranks.
#[pyfunction]
#[pyo3(signature = (spec, ranks = None, names = None))]
pub fn hdrm_hosts(
    py: Python<'_>,
    spec: &str,
    ranks: Option<u32>,
    names: Option<Vec<String>>,
) -> PyResult<Vec<String>> {
    let hosts = || Description::parse(spec)?.hdrm_hosts(ranks, names.as_deref());
    Ok(py.detach(hosts).map_err(Error::from)?)
}

/// Position in HDRM of each rank, from their hosts.
#[pyfunction]
#[pyo3(signature = (spec, hosts, names = None))]
pub fn hdrm_positions(
    py: Python<'_>,
    spec: &str,
    hosts: Vec<String>,
    names: Option<Vec<String>>,
) -> PyResult<Vec<u32>> {
    let order = || Description::parse(spec)?.rank_order(&hosts, names.as_deref());
    Ok(py.detach(order).map_err(Error::from)?.positions())
}

/// Any network: its counts and its JSON.
#[pyfunction]
pub fn topology_network(py: Python<'_>, spec: &str) -> PyResult<String> {
    Ok(py.detach(|| report::network_report(spec)).map_err(Error::from)?)
}

/// The path between two endpoints, by name or number.
#[pyfunction]
#[pyo3(signature = (spec, source, target, routing = "static", seed = Seed(0), flow = Flow(0)))]
pub fn topology_path(
    py: Python<'_>,
    spec: &str,
    source: &str,
    target: &str,
    routing: &str,
    seed: Seed,
    flow: Flow,
) -> PyResult<String> {
    let report = || report::path_report(spec, source, target, routing, seed.0, flow.0);
    Ok(py.detach(report).map_err(Error::from)?)
}
