//! `weft topo` reports, as JSON.

use crate::builders::BiGraph;
use crate::cabling::cables_csv;
use crate::describe::Description;
use crate::error::{Error, Result};
use crate::host::{Assumptions, Device, Finding, Host, NvLink, NvmlGpu, Pair};
use crate::network::{EndpointId, LinkId, Network, NodeId, NodeKind};
use crate::placement::RankPlacements;
use crate::routing::{Router, Routing};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Serialize)]
struct BiGraphReport {
    switches: u32,
    half: u32,
    endpoints: u32,
    trunks: u32,
    physical: Option<u32>,
    nics: u32,
    cables: usize,
    ranks: usize,
    left_out: u64,
    used_half: u32,
    used_ports: u32,
    reason: Option<String>,
    places: Option<RankPlacements>,
    /// File contents, by name.
    files: BTreeMap<&'static str, String>,
    /// Files that cannot be written, with the reason.
    unavailable: BTreeMap<&'static str, String>,
}

/// Report on a BiGraph as JSON: cabling, HDRM rank map in all formats, network.
///
/// # Errors
/// [`Error::Spec`] for a description that is not a BiGraph, and errors from [`Description::parse`].
pub fn bigraph_report(spec: &str, hosts: Option<&[String]>) -> Result<String> {
    let Description::BiGraph(shape) = Description::parse(spec)? else {
        let reason = "expected bigraph:...".to_owned();
        return Err(Error::Spec { spec: spec.to_owned(), reason });
    };
    let network = shape.network()?;
    let cables = shape.cables()?;
    let mut report = BiGraphReport {
        switches: 2 * shape.half,
        half: shape.half,
        endpoints: shape.endpoints,
        trunks: shape.trunks,
        physical: shape.physical,
        nics: shape.nics,
        cables: cables.len(),
        ranks: 0,
        left_out: shape.ports(),
        used_half: 0,
        used_ports: 0,
        reason: None,
        places: None,
        files: BTreeMap::from([
            ("cabling.csv", cables_csv(&cables)),
            ("network.json", network.to_json()),
        ]),
        unavailable: BTreeMap::new(),
    };
    match add_rank_map(&mut report, &shape, &network, hosts) {
        Err(Error::NoRankMap { reason, .. }) => report.reason = Some(reason),
        other => other?,
    }
    Ok(json(&report))
}

fn add_rank_map(
    report: &mut BiGraphReport,
    shape: &BiGraph,
    network: &Network,
    hosts: Option<&[String]>,
) -> Result<()> {
    let map = shape.embedded_rank_map()?;
    let places = shape.placements(&map.endpoints, hosts)?;
    report.files.insert("rank_map.csv", places.csv());
    report.files.insert("rankfile.txt", places.rankfile());
    for (name, text) in [("hostfile.txt", places.hostfile()), ("torchrun.txt", places.torchrun())] {
        match text {
            Ok(text) => drop(report.files.insert(name, text)),
            Err(error) => drop(report.unavailable.insert(name, error.to_string())),
        }
    }
    let mut network = network.with_rank_map(map.endpoints.clone())?;
    if hosts.is_some() {
        let ends =
            places.ranks.iter().map(|place| (EndpointId(place.endpoint), place.host.as_str()));
        network = network.with_hosts(ends);
    }
    report.files.insert("network.json", network.to_json());
    report.ranks = map.endpoints.len();
    report.left_out = map.left_out;
    (report.used_half, report.used_ports) = (map.half, map.ports);
    report.reason = map.reason;
    report.places = Some(places);
    Ok(())
}

#[derive(Serialize)]
struct NetworkReport<'a> {
    name: &'a str,
    endpoints: u32,
    switches: usize,
    hosts: usize,
    links: usize,
    least_gbps: f64,
    most_gbps: f64,
    routes: usize,
    rank_map: bool,
    warnings: Vec<String>,
    json: String,
}

/// Report on a network as JSON.
///
/// # Errors
/// Errors from [`Network::parse`].
pub fn network_report(spec: &str) -> Result<String> {
    let network = Network::parse(spec)?;
    let count = |kind| (0..network.nodes()).filter(|&n| network.kind(NodeId(n)) == kind).count();
    let gbps = || network.links().iter().map(|link| link.bandwidth / 1.25e8);
    Ok(json(&NetworkReport {
        name: network.name(),
        endpoints: network.endpoints(),
        switches: count(NodeKind::Switch),
        hosts: count(NodeKind::Host),
        links: network.links().len(),
        least_gbps: gbps().reduce(f64::min).unwrap_or(0.0),
        most_gbps: gbps().reduce(f64::max).unwrap_or(0.0),
        routes: network.routes().len(),
        rank_map: network.has_rank_map(),
        warnings: network.warnings(),
        json: network.to_json(),
    }))
}

/// Report on the path between two endpoints, by name or number, as JSON: link names, and the number of shortest paths.
///
/// # Errors
/// Errors from [`Network::parse`], [`Network::find_endpoint`] and [`Router::path`].
pub fn path_report(
    spec: &str,
    from: &str,
    to: &str,
    routing: &str,
    seed: u64,
    flow: u64,
) -> Result<String> {
    #[derive(Serialize)]
    struct PathReport {
        links: Vec<String>,
        latency_s: f64,
        least_gbps: Option<f64>,
        shortest_paths: u64,
    }
    let network = Network::parse(spec)?;
    let routing = match routing {
        "unique" => Routing::Unique,
        "ecmp" => Routing::Ecmp { seed },
        "static" => Routing::Static,
        "adaptive" => Routing::Adaptive,
        other => {
            let reason = format!("{other:?} is not one of unique, ecmp, static, adaptive");
            return Err(Error::Field { at: "routing".to_owned(), reason });
        }
    };
    let (from, to) = (network.find_endpoint(from)?, network.find_endpoint(to)?);
    let mut router = Router::new(&network, routing)?;
    let mut links: Vec<LinkId> = Vec::new();
    router.path(from, to, flow, &mut links)?;
    let info = || links.iter().map(|&link| network.link(link));
    Ok(json(&PathReport {
        latency_s: info().map(|link| link.latency).sum(),
        least_gbps: info().map(|link| link.bandwidth / 1.25e8).reduce(f64::min),
        shortest_paths: router.shortest_paths(from, to)?.0,
        links: links.iter().map(|&link| network.link_name(link)).collect(),
    }))
}

#[derive(Serialize)]
struct HostReport<'a> {
    devices: &'a [Device],
    nvlinks: &'a [NvLink],
    nvswitches: u32,
    numa_nodes: &'a [(u32, String)],
    pairs: Vec<NamedPair>,
    spare_nics: Vec<String>,
    findings: Vec<Finding>,
    assumptions: Assumptions,
    notes: &'a [String],
    tree: String,
    xml: String,
}

#[derive(Serialize)]
struct NamedPair {
    gpu: String,
    nic: String,
    distance: &'static str,
    further: bool,
}

/// Report on a server as JSON, read from sysfs below `root` or from NCCL's XML, with NVML's GPU list (JSON for
/// [`NvmlGpu`]).
///
/// # Errors
/// [`Error::Xml`], or [`Error::Json`] for NVML's list.
pub fn host_report(root: &Path, xml: Option<&str>, nvml: Option<&str>) -> Result<String> {
    let mut host = match xml {
        Some(xml) => Host::from_nccl_xml(xml)?,
        None => Host::from_sysfs(root),
    };
    if let Some(nvml) = nvml {
        let gpus: Vec<NvmlGpu> = serde_json::from_str(nvml).map_err(|error| Error::Json {
            what: "NVML's GPU list".to_owned(),
            line: error.line(),
            column: error.column(),
            reason: error.to_string(),
        })?;
        host.add_nvml(&gpus);
    }
    if xml.is_none() && nvml.is_none() && host.nvswitches == 0 && host.gpus().len() > 1 {
        let note = "NVLinks are unknown (NVML was not queried); if there are any, findings \
                    pairs-share-root-port and gpu-to-gpu overstate the cost";
        host.notes.push(note.to_owned());
    }
    let pairing = host.pairing();
    let named = |pair: &Pair, further| NamedPair {
        gpu: host.label(pair.gpu),
        nic: host.label(pair.nic),
        distance: pair.distance.short(),
        further,
    };
    let first = pairing.pairs.iter().map(|pair| named(pair, false));
    let further = pairing.further.iter().map(|pair| named(pair, true));
    let assumptions = Assumptions::default();
    Ok(json(&HostReport {
        devices: &host.devices,
        nvlinks: &host.nvlinks,
        nvswitches: host.nvswitches,
        numa_nodes: &host.numa_nodes,
        pairs: first.chain(further).collect(),
        spare_nics: pairing.spare.iter().map(|&nic| host.label(nic)).collect(),
        findings: host.lint(&assumptions),
        assumptions,
        notes: &host.notes,
        tree: host.tree(),
        xml: host.to_nccl_xml(),
    }))
}

/// JSON for a report; keys are strings and numbers finite, so this cannot fail.
fn json(report: &impl Serialize) -> String {
    serde_json::to_string(report).expect("a report is JSON")
}
