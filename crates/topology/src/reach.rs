//! Whether every endpoint reaches every other, and whether explicit routes can be followed.

use crate::error::{Error, Result};
use crate::network::{Adjacency, Graph, LinkInfo, NodeId};
use std::collections::HashMap;

/// Finds two endpoints without a path, if there are any.
///
/// One node that forwards, that every endpoint reaches and that reaches every endpoint settles it, and
/// nearly every network has one beside its first endpoint. Elsewhere pairs are looked at.
pub(crate) fn check(graph: &Graph) -> Result<()> {
    const TRIED: usize = 8;
    let first = graph.endpoints[0];
    let beside = graph.out.of(first).iter().map(|link| graph.links[link.0 as usize].to);
    let forwarding = |node: &NodeId| graph.nodes[node.0 as usize].forwards;
    for node in beside.filter(forwarding).take(TRIED) {
        let there = reached(graph, node, &graph.out, |link| link.to);
        let back = reached(graph, node, &graph.into, |link| link.from);
        let both = |endpoint: &NodeId| there[endpoint.0 as usize] && back[endpoint.0 as usize];
        if graph.endpoints.iter().all(both) {
            return Ok(());
        }
    }
    check_pairs(graph)
}

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
    for &from in &representatives {
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
