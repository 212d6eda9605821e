//! Servers and networks for `weft topo`: JSON out, for Python to print.

use crate::errors::Error;
use crate::interruptible::interruptible;
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
    xml: Option<String>,
    nvml: Option<String>,
) -> PyResult<String> {
    let report = move || report::host_report(&root, xml.as_deref(), nvml.as_deref());
    Ok(interruptible(py, report)?.map_err(Error::from)?)
}

/// A BiGraph's cabling, rank map in all forms, and network.
#[pyfunction]
#[pyo3(signature = (spec, hosts = None))]
pub fn topology_bigraph(
    py: Python<'_>,
    spec: String,
    hosts: Option<Vec<String>>,
) -> PyResult<String> {
    let report = move || report::bigraph_report(&spec, hosts.as_deref());
    Ok(interruptible(py, report)?.map_err(Error::from)?)
}

/// Each rank's host in HDRM's map: all ranks that have a place, or this many.
#[pyfunction]
#[pyo3(signature = (spec, ranks = None, names = None))]
pub fn hdrm_hosts(
    py: Python<'_>,
    spec: String,
    ranks: Option<u32>,
    names: Option<Vec<String>>,
) -> PyResult<Vec<String>> {
    let hosts = move || Description::parse(&spec)?.hdrm_hosts(ranks, names.as_deref());
    Ok(interruptible(py, hosts)?.map_err(Error::from)?)
}

/// Each rank's position in HDRM, from the hosts.
#[pyfunction]
#[pyo3(signature = (spec, hosts, names = None))]
pub fn hdrm_positions(
    py: Python<'_>,
    spec: String,
    hosts: Vec<String>,
    names: Option<Vec<String>>,
) -> PyResult<Vec<u32>> {
    let order =
        move || Ok(Description::parse(&spec)?.rank_order(&hosts, names.as_deref())?.positions());
    let order: Result<Vec<u32>, weft_topology::Error> = interruptible(py, order)?;
    Ok(order.map_err(Error::from)?)
}

/// Any network: counts and JSON.
#[pyfunction]
pub fn topology_network(py: Python<'_>, spec: String) -> PyResult<String> {
    Ok(interruptible(py, move || report::network_report(&spec))?.map_err(Error::from)?)
}

/// The path between two endpoints, by name or number.
#[pyfunction]
#[pyo3(signature = (spec, source, target, routing = "static", seed = Seed(0), flow = Flow(0)))]
pub fn topology_path(
    py: Python<'_>,
    spec: String,
    source: String,
    target: String,
    routing: &str,
    seed: Seed,
    flow: Flow,
) -> PyResult<String> {
    let routing = routing.to_owned();
    let report = move || report::path_report(&spec, &source, &target, &routing, seed.0, flow.0);
    Ok(interruptible(py, report)?.map_err(Error::from)?)
}
