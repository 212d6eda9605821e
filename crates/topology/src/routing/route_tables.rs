//! Explicit routing tables.

use super::next_hops::NextHops;
use super::places::NONE;
use crate::error::{Error, Result};
use crate::network::{EndpointId, LinkId, Network, NodeId, limit};
use std::collections::HashMap;

/// Each node's next link, for each destination with an explicit route; where no route matches, the D-mod-k link.
#[derive(Clone, Debug)]
pub struct RouteTables {
    by_destination: HashMap<EndpointId, Box<[Option<LinkId>]>>,
}

/// Limit on the total table size, in words.
const MAX_WORDS: u64 = 1 << 25;

impl RouteTables {
    pub fn new(network: &Network, hops: &mut NextHops) -> Result<RouteTables> {
        let routes = network.routes();
        let endpoints = (0..network.endpoints()).map(EndpointId);
        let mut destinations: Vec<EndpointId> =
            routes.iter().filter_map(|route| route.to).collect();
        if routes.iter().any(|route| route.to.is_none()) {
            destinations = endpoints.collect();
        }
        destinations.sort_unstable();
        destinations.dedup();
        let words = destinations.len() as u128 * u128::from(network.nodes());
        limit("words in explicit routing tables", words, MAX_WORDS)?;
        let mut explicit: HashMap<(NodeId, Option<EndpointId>), LinkId> = HashMap::new();
        for route in routes {
            let link = network.links_between(route.node, route.via).next();
            explicit.extend(link.map(|link| ((route.node, route.to), link)));
        }
        let mut by_destination = HashMap::new();
        for to in destinations {
            let table: Box<[Option<LinkId>]> = (0..network.nodes())
                .map(NodeId)
                .map(|node| {
                    let own = explicit.get(&(node, Some(to))).or(explicit.get(&(node, None)));
                    own.copied().or_else(|| by_default(network, hops, node, to))
                })
                .collect();
            check(network, to, &table)?;
            by_destination.insert(to, table);
        }
        Ok(RouteTables { by_destination })
    }

    pub fn of(&self, to: EndpointId) -> Option<&[Option<LinkId>]> {
        self.by_destination.get(&to).map(|table| &**table)
    }
}

/// Next link by D-mod-k.
fn by_default(
    network: &Network,
    hops: &mut NextHops,
    node: NodeId,
    to: EndpointId,
) -> Option<LinkId> {
    if network.endpoint(to) == node {
        return None;
    }
    let target = hops.entry(to);
    let place = hops.place(node);
    if place == NONE {
        // An endpoint outside the core has one link.
        return network.links_from(node).first().copied();
    }
    if place == target.node {
        return target.down;
    }
    hops.prepare(target.node);
    let set = hops.table(target.node)[place as usize];
    if set == NONE {
        return None;
    }
    let choices = hops.choices(place, set);
    Some(choices.links[choices.by_destination(to)])
}

/// Checks that the table leads from each endpoint to `to`, without a loop.
fn check(network: &Network, to: EndpointId, table: &[Option<LinkId>]) -> Result<()> {
    let target = network.endpoint(to);
    // Number of the walk that visited a node first; a second visit in the same walk closes a loop.
    let mut visited_in = vec![0u32; table.len()];
    for (number, &start) in network.graph.endpoints.iter().enumerate() {
        let walk = number as u32 + 1;
        let mut at = start;
        while at != target && visited_in[at.0 as usize] == 0 {
            visited_in[at.0 as usize] = walk;
            let Some(link) = table[at.0 as usize] else {
                let name = |node| network.node_name(node).to_owned();
                return Err(Error::Unreachable { from: name(start), to: name(target) });
            };
            at = network.link(link).to;
            let forwards = network.graph.nodes[at.0 as usize].forwards;
            if at != target && !forwards {
                let name = |node| network.node_name(node).to_owned();
                return Err(Error::Unreachable { from: name(start), to: name(target) });
            }
        }
        if at != target && visited_in[at.0 as usize] == walk {
            return Err(routing_loop(network, at, target, table));
        }
    }
    Ok(())
}

fn routing_loop(
    network: &Network,
    first: NodeId,
    target: NodeId,
    table: &[Option<LinkId>],
) -> Error {
    let mut nodes = vec![network.node_name(first).to_owned()];
    let mut at = first;
    while let Some(link) = table[at.0 as usize] {
        at = network.link(link).to;
        nodes.push(network.node_name(at).to_owned());
        if at == first {
            break;
        }
    }
    Error::RoutingLoop { to: network.node_name(target).to_owned(), nodes }
}
