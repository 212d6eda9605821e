//! Checks that all endpoints can be reached, and that explicit routes are valid.

use crate::adjacency::Adjacency;
use crate::error::{Error, Result};
use crate::network::{Graph, LinkInfo, NodeId, limit};
use std::collections::{HashMap, VecDeque};

/// Checks that each endpoint reaches each other.
///
/// One forwarding node that all endpoints reach and that reaches all endpoints suffices. Nearly all networks
/// have one next to the first endpoint, most others half way to the farthest node. The remaining networks are
/// checked by pairs.
pub(crate) fn check(graph: &Graph) -> Result<()> {
    const CANDIDATES: usize = 8;
    let first = graph.endpoints[0];
    let beside = graph.out.of(first).iter().map(|link| graph.links[link.0 as usize].to);
    let forwarding = |node: &NodeId| graph.nodes[node.0 as usize].forwards;
    let on_the_way = std::iter::once_with(|| half_way(graph, first)).flatten();
    for node in beside.take(CANDIDATES).chain(on_the_way).filter(forwarding) {
        let there = reached(graph, node, &graph.out, |link| link.to);
        let back = reached(graph, node, &graph.into, |link| link.from);
        let both = |endpoint: &NodeId| there[endpoint.0 as usize] && back[endpoint.0 as usize];
        if graph.endpoints.iter().all(both) {
            return Ok(());
        }
    }
    check_pairs(graph)
}

/// Middle node on a shortest path to a farthest node.
fn half_way(graph: &Graph, from: NodeId) -> Option<NodeId> {
    let mut before = vec![None; graph.nodes.len()];
    let mut left = VecDeque::from([from]);
    let mut last = from;
    while let Some(node) = left.pop_front() {
        last = node;
        if node != from && !graph.nodes[node.0 as usize].forwards {
            continue;
        }
        for link in graph.out.of(node) {
            let next = graph.links[link.0 as usize].to;
            if next != from && before[next.0 as usize].is_none() {
                before[next.0 as usize] = Some(node);
                left.push_back(next);
            }
        }
    }
    let way: Vec<_> = std::iter::successors(Some(last), |node| before[node.0 as usize]).collect();
    way.get(way.len() / 2).copied()
}

/// Maximum nodes and links visited to compare pairs.
const MAX_VISITED: u64 = 1 << 34;

/// Checks one endpoint for each neighbour set: endpoints with equal sets reach the same nodes.
fn check_pairs(graph: &Graph) -> Result<()> {
    let mut groups: HashMap<Vec<NodeId>, NodeId> = HashMap::new();
    for &endpoint in &graph.endpoints {
        let mut neighbours: Vec<NodeId> =
            graph.out.of(endpoint).iter().map(|link| graph.links[link.0 as usize].to).collect();
        neighbours.sort_unstable();
        neighbours.dedup();
        groups.entry(neighbours).or_insert(endpoint);
    }
    let mut representatives: Vec<NodeId> = groups.into_values().collect();
    representatives.sort_unstable();
    let each = (graph.nodes.len() + graph.links.len()) as u128;
    let what = "nodes and links to visit in the check that each endpoint reaches each other";
    for (done, &from) in (1..).zip(&representatives) {
        limit(what, done * each, MAX_VISITED)?;
        let there = reached(graph, from, &graph.out, |link| link.to);
        for &to in &graph.endpoints {
            if !there[to.0 as usize] {
                let name = |node: NodeId| graph.nodes[node.0 as usize].name.clone();
                return Err(Error::Unreachable { from: name(from), to: name(to) });
            }
        }
    }
    Ok(())
}

fn reached(
    graph: &Graph,
    from: NodeId,
    adjacency: &Adjacency,
    end: impl Fn(&LinkInfo) -> NodeId,
) -> Vec<bool> {
    let mut seen = vec![false; graph.nodes.len()];
    let mut left = vec![from];
    seen[from.0 as usize] = true;
    while let Some(node) = left.pop() {
        for link in adjacency.of(node) {
            let next = end(&graph.links[link.0 as usize]);
            if !seen[next.0 as usize] {
                seen[next.0 as usize] = true;
                if graph.nodes[next.0 as usize].forwards {
                    left.push(next);
                }
            }
        }
    }
    seen
}

/// Checks each routing table entry: a link to the next hop, a forwarding next hop, no duplicates.
pub(crate) fn check_routes(graph: &Graph) -> Result<()> {
    let mut seen = HashMap::new();
    for (number, route) in graph.routes.iter().enumerate() {
        let at = || format!("routes[{number}]");
        let name = |node: NodeId| graph.nodes[node.0 as usize].name.clone();
        for node in [route.node, route.via] {
            if node.0 as usize >= graph.nodes.len() {
                let name = format!("#{}", node.0);
                return Err(Error::UnknownNode { at: at(), name, hint: String::new() });
            }
        }
        let target = match route.to {
            None => None,
            Some(to) => Some(*graph.endpoints.get(to.0 as usize).ok_or({
                let endpoints = graph.endpoints.len() as u32;
                Error::EndpointOutOfRange { endpoint: to.0, endpoints }
            })?),
        };
        let to = target.map_or_else(|| "*".to_owned(), name);
        let refuse = |reason| {
            Err(Error::BadRoute {
                at: at(),
                node: name(route.node),
                to: to.clone(),
                via: name(route.via),
                reason,
            })
        };
        let links = graph.out.of(route.node);
        if !links.iter().any(|link| graph.links[link.0 as usize].to == route.via) {
            return refuse("to which it has no link");
        }
        if Some(route.node) == target {
            return refuse("but it is the destination itself");
        }
        if Some(route.via) != target
            && target.is_some()
            && !graph.nodes[route.via.0 as usize].forwards
        {
            return refuse("which does not forward");
        }
        if seen.insert((route.node, route.to), number).is_some() {
            return refuse("a duplicate of an earlier route");
        }
    }
    Ok(())
}
