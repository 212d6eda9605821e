//! Networks in JSON: parser and writer. `docs/topology.md` has the schema with examples.

mod options;
mod write;

use crate::builder::NetworkBuilder;
use crate::describe::Description;
use crate::error::{Error, Result};
use crate::names::expand;
use crate::network::{
    BYTES_PER_GIGABIT, EndpointId, LinkSpec, MAX_LINKS, Network, NodeId, NodeKind, Route, limit,
};
use options::{OptionList, options_from_json};
use serde::{Deserialize, Serialize};
use write::write;

/// Network as a file has it.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct NetworkFile {
    #[serde(default)]
    name: String,
    #[serde(default)]
    default: Speed,
    #[serde(default)]
    switches: Vec<String>,
    #[serde(default)]
    hosts: Vec<String>,
    #[serde(default)]
    endpoints: Vec<EndpointEntry>,
    #[serde(default)]
    links: Vec<LinkEntry>,
    #[serde(default)]
    routes: Vec<RouteEntry>,
    rank_map: Option<Vec<String>>,
    bigraph: Option<OptionList>,
    #[serde(rename = "fat-tree")]
    fat_tree: Option<OptionList>,
    #[serde(rename = "fat-tree3")]
    fat_tree3: Option<OptionList>,
    rail: Option<OptionList>,
}

/// Bandwidth and latency, each in one of two units.
#[derive(Deserialize, Clone, Copy, Default)]
#[serde(deny_unknown_fields)]
struct Speed {
    gbps: Option<f64>,
    bytes_per_s: Option<f64>,
    latency_us: Option<f64>,
    latency_s: Option<f64>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "an endpoint is a name, or an object with name, host and forwards")]
enum EndpointEntry {
    Name(String),
    Full(FullEndpoint),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FullEndpoint {
    name: String,
    host: Option<String>,
    #[serde(default)]
    forwards: bool,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "a link is two names, or an object with from and to and, if wanted, gbps or \
                 bytes_per_s, latency_us or latency_s, count, pairwise, oneway"
)]
enum LinkEntry {
    Pair([String; 2]),
    Full(FullLink),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FullLink {
    from: String,
    to: String,
    gbps: Option<f64>,
    bytes_per_s: Option<f64>,
    latency_us: Option<f64>,
    latency_s: Option<f64>,
    #[serde(default = "one")]
    count: u32,
    #[serde(default)]
    pairwise: bool,
    #[serde(default)]
    oneway: bool,
}

fn one() -> u32 {
    1
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RouteEntry {
    at: String,
    to: String,
    via: String,
}

impl Speed {
    fn is_given(&self) -> bool {
        let Speed { gbps, bytes_per_s, latency_us, latency_s } = self;
        [gbps, bytes_per_s, latency_us, latency_s].iter().any(|field| field.is_some())
    }

    /// The values set here, and the others from `default`.
    fn over(self, default: LinkSpec, at: &dyn Fn() -> String) -> Result<LinkSpec> {
        let twice = |one: &str, other: &str| Error::Field {
            at: at(),
            reason: format!("{one} and {other} are both set; set one of them"),
        };
        let bandwidth = match (self.gbps, self.bytes_per_s) {
            (Some(_), Some(_)) => return Err(twice("gbps", "bytes_per_s")),
            (Some(gbps), None) => gbps * BYTES_PER_GIGABIT,
            (None, Some(bytes)) => bytes,
            (None, None) => default.bandwidth,
        };
        let latency = match (self.latency_us, self.latency_s) {
            (Some(_), Some(_)) => return Err(twice("latency_us", "latency_s")),
            (Some(us), None) => us * 1e-6,
            (None, Some(seconds)) => seconds,
            (None, None) => default.latency,
        };
        LinkSpec { bandwidth, latency }.checked(at)
    }
}

impl Description {
    /// Parses JSON: nodes and links, or builder options.
    pub fn from_json(text: &str) -> Result<Description> {
        describe(text)
    }
}

impl Network {
    /// Network from a JSON text.
    pub fn from_json(text: &str) -> Result<Network> {
        Description::from_json(text)?.network()
    }

    /// The network as JSON. Parsed again, it has the same endpoint and link numbers, and the same values bit for bit.
    pub fn to_json(&self) -> String {
        write(self)
    }
}

fn describe(text: &str) -> Result<Description> {
    if !text.trim_start().starts_with('{') {
        return Err(Error::Json {
            what: "the network's JSON".to_owned(),
            line: 1,
            column: 1,
            reason: "a network is an object: {\"endpoints\": ..., \"links\": ...}".to_owned(),
        });
    }
    let file: NetworkFile = serde_json::from_str(text).map_err(|error| Error::Json {
        what: "the network's JSON".to_owned(),
        line: error.line(),
        column: error.column(),
        reason: reason(&error),
    })?;
    let builders = [
        ("bigraph", &file.bigraph),
        ("fat-tree", &file.fat_tree),
        ("fat-tree3", &file.fat_tree3),
        ("rail", &file.rail),
    ];
    let mut given = builders.into_iter().filter_map(|(kind, map)| Some((kind, map.as_ref()?)));
    let Some((kind, options)) = given.next() else {
        return Ok(Description::Explicit(network(&file)?));
    };
    if let Some((other, _)) = given.next() {
        let reason = format!("{kind} is set too; set one of them");
        return Err(Error::Field { at: other.to_owned(), reason });
    }
    let explicit =
        !file.switches.is_empty() || !file.endpoints.is_empty() || !file.links.is_empty();
    if explicit || !file.hosts.is_empty() || !file.routes.is_empty() || file.rank_map.is_some() {
        let reason = "makes all nodes and links; remove the other fields";
        return Err(Error::Field { at: kind.to_owned(), reason: reason.to_owned() });
    }
    if file.default.is_given() {
        let reason = format!("ignored by {kind}; set {kind}.gbps and {kind}.latency_us");
        return Err(Error::Field { at: "default".to_owned(), reason });
    }
    Description::from_options(kind, options_from_json(kind, options)?)
}

/// serde_json message without the position, which ours has in front.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

fn network(file: &NetworkFile) -> Result<Network> {
    let default = file.default.over(LinkSpec::default(), &|| "default".to_owned())?;
    let mut network = NetworkBuilder::new(file.name.as_str());
    for (number, pattern) in file.switches.iter().enumerate() {
        let at = || format!("switches[{number}]");
        for name in expand(pattern, &at)? {
            placed(network.switch(name), at)?;
        }
    }
    for (number, pattern) in file.hosts.iter().enumerate() {
        let at = || format!("hosts[{number}]");
        for name in expand(pattern, &at)? {
            placed(network.host(name), at)?;
        }
    }
    for (number, entry) in file.endpoints.iter().enumerate() {
        let at = || format!("endpoints[{number}]");
        let (pattern, host, forwards) = match entry {
            EndpointEntry::Name(name) => (name, None, false),
            EndpointEntry::Full(full) => (&full.name, full.host.as_deref(), full.forwards),
        };
        for name in expand(pattern, &at)? {
            let added = if forwards {
                network.forwarding_endpoint(name, host)
            } else {
                network.endpoint(name, host)
            };
            placed(added, at)?;
        }
    }
    let mut links = 0;
    for (number, entry) in file.links.iter().enumerate() {
        links += add_links(&mut network, number, entry, default, links)?;
    }
    let endpoints = numbers_of_endpoints(&network);
    for (number, entry) in file.routes.iter().enumerate() {
        add_routes(&mut network, number, entry, &endpoints)?;
    }
    if let Some(names) = &file.rank_map {
        let mut map = Vec::new();
        for (number, pattern) in names.iter().enumerate() {
            let at = || format!("rank_map[{number}]");
            let names = expand(pattern, &at)?;
            let ranks = map.len() + names.len();
            limit("ranks of the rank map", ranks as u128, network.endpoints().into())?;
            for name in names {
                map.push(endpoint(&network, &endpoints, &name, &at)?);
            }
        }
        network.rank_map(map);
    }
    network.finish()
}

/// Replaces an error's position, a node or link number, by the file entry.
fn placed<T>(result: Result<T>, place: impl FnOnce() -> String) -> Result<T> {
    result.map_err(|mut error| {
        if let Error::DuplicateName { at, .. }
        | Error::BadName { at, .. }
        | Error::SelfLink { at, .. }
        | Error::Number { at, .. } = &mut error
        {
            *at = place();
        }
        error
    })
}

/// Adds an entry's links; returns how many.
fn add_links(
    network: &mut NetworkBuilder,
    number: usize,
    entry: &LinkEntry,
    default: LinkSpec,
    before: u128,
) -> Result<u128> {
    let at = || format!("links[{number}]");
    let (from, to, spec, count, pairwise, oneway) = match entry {
        LinkEntry::Pair([from, to]) => (from, to, default, 1, false, false),
        LinkEntry::Full(link) => {
            let &FullLink { gbps, bytes_per_s, latency_us, latency_s, count, .. } = link;
            let speed = Speed { gbps, bytes_per_s, latency_us, latency_s };
            let spec = speed.over(default, &at)?;
            (&link.from, &link.to, spec, count, link.pairwise, link.oneway)
        }
    };
    if count == 0 {
        let what = format!("{}.count", at());
        return Err(Error::Count { what, value: 0, must: "at least 1" });
    }
    let nodes = |pattern: &str, side: &str| -> Result<Vec<NodeId>> {
        let at = || format!("links[{number}].{side}");
        expand(pattern, &at)?.iter().map(|name| network.named(name, at)).collect()
    };
    let (ones, others) = (nodes(from, "from")?, nodes(to, "to")?);
    if pairwise && ones.len() != others.len() {
        let reason = format!(
            "pairwise, but {from:?} are {} nodes and {to:?} are {}",
            ones.len(),
            others.len()
        );
        return Err(Error::Field { at: at(), reason });
    }
    let pairs = ones.len() as u128 * if pairwise { 1 } else { others.len() as u128 };
    let links = pairs * u128::from(count) * if oneway { 1 } else { 2 };
    limit("directed links", before + links, MAX_LINKS)?;
    let mut add = |from, to| -> Result<()> {
        for _ in 0..count {
            let added =
                if oneway { network.link(from, to, spec) } else { network.cable(from, to, spec) };
            placed(added, at)?;
        }
        Ok(())
    };
    for (place, &from) in ones.iter().enumerate() {
        match pairwise {
            true => add(from, others[place])?,
            false => others.iter().try_for_each(|&to| add(from, to))?,
        }
    }
    Ok(links)
}

/// Each node's endpoint.
fn numbers_of_endpoints(network: &NetworkBuilder) -> Vec<Option<EndpointId>> {
    let mut next = 0;
    network
        .kinds()
        .map(|kind| {
            (kind == NodeKind::Endpoint).then(|| {
                next += 1;
                EndpointId(next - 1)
            })
        })
        .collect()
}

fn endpoint(
    network: &NetworkBuilder,
    endpoints: &[Option<EndpointId>],
    name: &str,
    at: &dyn Fn() -> String,
) -> Result<EndpointId> {
    let node = network.named(name, at)?;
    endpoints[node.0 as usize]
        .ok_or_else(|| Error::Field { at: at(), reason: format!("{name:?} is not an endpoint") })
}

fn add_routes(
    network: &mut NetworkBuilder,
    number: usize,
    entry: &RouteEntry,
    endpoints: &[Option<EndpointId>],
) -> Result<()> {
    let side = |side: &str| format!("routes[{number}].{side}");
    let node = network.named(&entry.at, || side("at"))?;
    let via = network.named(&entry.via, || side("via"))?;
    if entry.to == "*" {
        network.route(Route { node, to: None, via });
        return Ok(());
    }
    let names = expand(&entry.to, &|| side("to"))?;
    limit("routes", network.routes() as u128 + names.len() as u128, MAX_LINKS)?;
    for name in names {
        let to = Some(endpoint(network, endpoints, &name, &|| side("to"))?);
        network.route(Route { node, to, via });
    }
    Ok(())
}
