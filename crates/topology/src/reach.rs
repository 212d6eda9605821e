//! Whether every endpoint reaches every other, and whether explicit routes can be followed.

use crate::adjacency::Adjacency;
use crate::error::{Error, Result};
use crate::network::{Graph, LinkInfo, NodeId, limit};
use std::collections::{HashMap, VecDeque};

/// Finds two endpoints without a path, if there are any.
///
/// One node that forwards, that every endpoint reaches and that reaches every endpoint settles it. Nearly every
/// network has one beside its first endpoint, and most others half way to the farthest. Elsewhere pairs are looked
/// at.
pub(crate) fn check(graph: &Graph) -> Result<()> {
    const TRIED: usize = 8;
    let first = graph.endpoints[0];
    let beside = graph.out.of(first).iter().map(|link| graph.links[link.0 as usize].to);
    let forwarding = |node: &NodeId| graph.nodes[node.0 as usize].forwards;
    let on_the_way = std::iter::once_with(|| half_way(graph, first)).flatten();
    for node in beside.take(TRIED).chain(on_the_way).filter(forwarding) {
        let there = reached(graph, node, &graph.out, |link| link.to);
        let back = reached(graph, node, &graph.into, |link| link.from);
        let both = |endpoint: &NodeId| there[endpoint.0 as usize] && back[endpoint.0 as usize];
        if graph.endpoints.iter().all(both) {
            return Ok(());
        }
    }
    check_pairs(graph)
}

/// The node in the middle of a shortest path to a node as far as there is.
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

/// The most nodes and links that are looked at to compare pairs.
const MAX_LOOKED_AT: u64 = 1 << 34;

/// Looks at one endpoint of each set of neighbours, for all with the same set reach the same.
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
    let what = "nodes and links to visit, to find whether every endpoint reaches every other";
    for (done, &from) in (1..).zip(&representatives) {
        limit(what, done * each, MAX_LOOKED_AT)?;
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

/// Finds an entry of a routing table that no link can follow, or that is there twice.
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
            return refuse("but it is there already");
        }
        if Some(route.via) != target
            && target.is_some()
            && !graph.nodes[route.via.0 as usize].forwards
        {
            return refuse("which does not forward");
        }
        if seen.insert((route.node, route.to), number).is_some() {
            return refuse("but it has a route to there already");
        }
    }
    Ok(())
}
