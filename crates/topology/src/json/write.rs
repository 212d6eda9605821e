//! JSON writer for networks.

use crate::network::{BYTES_PER_GIGABIT, EndpointId, LinkId, Network, NodeId, NodeKind};

/// The network as JSON, one line for each node and link; values are exact.
pub(crate) fn write(network: &Network) -> String {
    let mut lists: Vec<(&str, Vec<String>)> = Vec::new();
    let nodes = || (0..network.nodes()).map(NodeId);
    for (name, kind) in [("switches", NodeKind::Switch), ("hosts", NodeKind::Host)] {
        let these = nodes().filter(|&node| network.kind(node) == kind);
        lists.push((name, these.map(|node| quoted(network.node_name(node))).collect()));
    }
    let endpoints = (0..network.endpoints()).map(EndpointId);
    lists.push(("endpoints", endpoints.map(|endpoint| endpoint_json(network, endpoint)).collect()));
    let links = (0..network.links().len() as u32).map(LinkId);
    lists.push(("links", links.filter_map(|link| link_json(network, link)).collect()));
    let routes = network.routes().iter().map(|route| {
        let to = route.to.map_or("*", |to| network.endpoint_name(to));
        let name = |node| quoted(network.node_name(node));
        format!(
            "{{\"at\": {}, \"to\": {}, \"via\": {}}}",
            name(route.node),
            quoted(to),
            name(route.via)
        )
    });
    lists.push(("routes", routes.collect()));
    if network.has_rank_map() {
        let map = network.rank_map();
        let names = map.iter().map(|&endpoint| quoted(network.endpoint_name(endpoint)));
        lists.push(("rank_map", names.collect()));
    }
    let mut text = format!("{{\n  \"name\": {}", quoted(network.name()));
    for (name, lines) in lists.iter().filter(|(_, lines)| !lines.is_empty()) {
        text.push_str(&format!(",\n  \"{name}\": [\n    {}\n  ]", lines.join(",\n    ")));
    }
    text.push_str("\n}\n");
    text
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn endpoint_json(network: &Network, endpoint: EndpointId) -> String {
    let name = quoted(network.endpoint_name(endpoint));
    let node = &network.graph.nodes[network.endpoint(endpoint).0 as usize];
    let host = node.host.as_deref().map(|host| format!(", \"host\": {}", quoted(host)));
    match (host, node.forwards) {
        (None, false) => name,
        (host, forwards) => {
            let forwards = if forwards { ", \"forwards\": true" } else { "" };
            format!("{{\"name\": {name}{}{forwards}}}", host.unwrap_or_default())
        }
    }
}

/// A cable at its first direction; `None` at the second.
fn link_json(network: &Network, link: LinkId) -> Option<String> {
    let info = network.link(link);
    if info.reverse.is_some_and(|reverse| reverse < link) {
        return None;
    }
    let gbps = info.bandwidth / BYTES_PER_GIGABIT;
    let bandwidth = match gbps * BYTES_PER_GIGABIT == info.bandwidth {
        true => format!("\"gbps\": {gbps}"),
        false => format!("\"bytes_per_s\": {}", info.bandwidth),
    };
    let us = info.latency * 1e6;
    let latency = match us * 1e-6 == info.latency {
        true => format!("\"latency_us\": {us}"),
        false => format!("\"latency_s\": {}", info.latency),
    };
    let oneway = if info.reverse.is_none() { ", \"oneway\": true" } else { "" };
    Some(format!(
        "{{\"from\": {}, \"to\": {}, {bandwidth}, {latency}{oneway}}}",
        quoted(network.node_name(info.from)),
        quoted(network.node_name(info.to))
    ))
}
