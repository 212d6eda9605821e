//! Routing: the links that a message crosses.
//!
//! - `next_hops.rs`: shortest-path tables by destination
//! - `core_links.rs`, `link_sets.rs`: core adjacency, and next hop sets
//! - `route_tables.rs`: explicit routes
//! - `places.rs`: places in the node list

mod core_links;
mod link_sets;
mod next_hops;
mod places;
mod route_tables;

use crate::error::{Error, Result};
use crate::network::{EndpointId, LinkId, Network};
use crate::routing::places::NONE;
use next_hops::{Choices, NextHops};
use route_tables::RouteTables;

/// Choice among shortest paths (fewest links). Only explicit routes may take longer ones. A shortest path that crosses
/// no switch excludes those that do: NVLink or PCIe wins over the NIC at equal length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Routing {
    /// The only shortest path; a pair with several is an error.
    Unique,
    /// Hash of source, destination, flow, seed and node, as switches hash a connection's addresses and ports. Each
    /// node hashes independently.
    Ecmp {
        /// Hash seed.
        seed: u64,
    },
    /// By destination only: explicit routes where the network has them, elsewhere D-mod-k, which spreads destinations
    /// evenly over the uplinks in a fat tree.
    Static,
    /// Least loaded link at each node, by the caller's loads in
    /// [`adaptive_path`](Router::adaptive_path). Ties go to the static choice.
    Adaptive,
}

/// Router: paths on a network. Tables are made per destination switch on first use and kept, with one word for each
/// node; no table is per endpoint pair.
#[derive(Clone, Debug)]
pub struct Router {
    network: Network,
    routing: Routing,
    hops: NextHops,
    tables: Option<RouteTables>,
}

impl Router {
    /// A router on that network. If the routing follows explicit routes, they are checked to reach the destinations.
    pub fn new(network: &Network, routing: Routing) -> Result<Router> {
        let mut hops = NextHops::new(network);
        let tables = match routing {
            Routing::Static if !network.routes().is_empty() => {
                Some(RouteTables::new(network, &mut hops)?)
            }
            _ => None,
        };
        Ok(Router { network: network.clone(), routing, hops, tables })
    }

    /// The network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Rule by which paths are chosen.
    pub fn routing(&self) -> Routing {
        self.routing
    }

    /// Replaces `links` by a flow's path: the links in order, none from an endpoint to itself.
    ///
    /// `flow` represents a connection's ports: connections between one endpoint pair differ in it. Only
    /// [`Routing::Ecmp`] uses it. Under [`Routing::Adaptive`] all loads count as zero here.
    ///
    /// # Errors
    /// [`Error::EndpointOutOfRange`]; [`Error::NotUnique`] under [`Routing::Unique`];
    /// [`Error::Unreachable`] if links have failed.
    pub fn path(
        &mut self,
        from: EndpointId,
        to: EndpointId,
        flow: u64,
        links: &mut Vec<LinkId>,
    ) -> Result<()> {
        match self.routing {
            Routing::Unique => self.walk(from, to, links, |choices| match choices.links {
                [one] => Some(*one),
                _ => None,
            }),
            Routing::Ecmp { seed } => {
                let pair = u64::from(from.0) << 32 | u64::from(to.0);
                let hash = mix(mix(mix(seed ^ SALT) ^ pair) ^ flow);
                self.walk(from, to, links, |choices| {
                    let hash = mix(hash ^ choices.key);
                    // The product's upper half is a number below the length, without a division.
                    let pick = (u128::from(hash) * choices.links.len() as u128) >> 64;
                    Some(choices.links[pick as usize])
                })
            }
            Routing::Static if self.tables.is_some() => self.table_path(from, to, links),
            Routing::Static | Routing::Adaptive => self
                .walk(from, to, links, |choices| Some(choices.links[choices.by_destination(to)])),
        }
    }

    /// Replaces `links` by the path on which each node takes the least loaded next hop toward `to`.
    ///
    /// # Errors
    /// Same as for [`path`](Router::path).
    pub fn adaptive_path(
        &mut self,
        from: EndpointId,
        to: EndpointId,
        load: impl Fn(LinkId) -> f64,
        links: &mut Vec<LinkId>,
    ) -> Result<()> {
        self.walk(from, to, links, |choices| {
            let first = choices.by_destination(to);
            let mut best = choices.links[first];
            let mut least = load(best);
            for step in 1..choices.links.len() {
                let link = choices.links[(first + step) % choices.links.len()];
                let its = load(link);
                if its < least {
                    (best, least) = (link, its);
                }
            }
            Some(best)
        })
    }

    /// Fails a link: later paths avoid it. Paths over explicit routes cannot, and become errors.
    pub fn fail_link(&mut self, link: LinkId) -> Result<()> {
        self.set_failed(link, true)
    }

    /// Restores a failed link.
    pub fn restore_link(&mut self, link: LinkId) -> Result<()> {
        self.set_failed(link, false)
    }

    fn set_failed(&mut self, link: LinkId, failed: bool) -> Result<()> {
        let links = self.network.links().len();
        if link.0 as usize >= links {
            return Err(Error::LinkOutOfRange { link: link.0, links });
        }
        self.hops.set_failed(link, failed);
        Ok(())
    }

    /// Number of shortest paths from one endpoint to another that routing may choose, and the path length in links.
    /// Counts saturate at `u64::MAX`.
    pub fn shortest_paths(&mut self, from: EndpointId, to: EndpointId) -> Result<(u64, u32)> {
        self.check(from)?;
        self.check(to)?;
        if from == to {
            return Ok((1, 0));
        }
        let found = self.hops.count(from, to);
        found.ok_or_else(|| self.unreachable(from, to))
    }

    fn check(&self, endpoint: EndpointId) -> Result<()> {
        let endpoints = self.network.endpoints();
        if endpoint.0 >= endpoints {
            return Err(Error::EndpointOutOfRange { endpoint: endpoint.0, endpoints });
        }
        Ok(())
    }

    /// Follows next hops from `from` to `to`; `pick` returns `None` to reject a choice.
    fn walk(
        &mut self,
        from: EndpointId,
        to: EndpointId,
        links: &mut Vec<LinkId>,
        mut pick: impl FnMut(&Choices<'_>) -> Option<LinkId>,
    ) -> Result<()> {
        links.clear();
        self.check(from)?;
        self.check(to)?;
        if from == to {
            return Ok(());
        }
        let (start, target) = (self.hops.entry(from), self.hops.entry(to));
        if [start.up, target.down].into_iter().flatten().any(|link| self.hops.is_failed(link)) {
            return Err(self.unreachable(from, to));
        }
        links.extend(start.up);
        self.hops.prepare(target.node);
        let table = self.hops.table(target.node);
        let mut at = start.node;
        while at != target.node {
            let set = table[at as usize];
            if set == NONE {
                return Err(self.unreachable(from, to));
            }
            let choices = self.hops.choices(at, set);
            let Some(link) = pick(&choices) else {
                return Err(self.not_unique(from, to, &choices));
            };
            links.push(link);
            at = self.hops.head(link);
        }
        links.extend(target.down);
        Ok(())
    }

    fn table_path(
        &mut self,
        from: EndpointId,
        to: EndpointId,
        links: &mut Vec<LinkId>,
    ) -> Result<()> {
        self.check(from)?;
        self.check(to)?;
        let tables = self.tables.as_ref().expect("the caller checked");
        let Some(table) = tables.of(to) else {
            return self
                .walk(from, to, links, |choices| Some(choices.links[choices.by_destination(to)]));
        };
        links.clear();
        let target = self.network.endpoint(to);
        let mut at = self.network.endpoint(from);
        while at != target {
            // Tables are checked to have no loop, so this ends.
            match table[at.0 as usize] {
                Some(link) if !self.hops.is_failed(link) => {
                    links.push(link);
                    at = self.network.link(link).to;
                }
                _ => return Err(self.unreachable(from, to)),
            }
        }
        Ok(())
    }

    fn unreachable(&self, from: EndpointId, to: EndpointId) -> Error {
        let name = |endpoint| self.network.endpoint_name(endpoint).to_owned();
        Error::Unreachable { from: name(from), to: name(to) }
    }

    fn not_unique(&self, from: EndpointId, to: EndpointId, choices: &Choices<'_>) -> Error {
        let name = |endpoint| Box::from(self.network.endpoint_name(endpoint));
        Error::NotUnique {
            from: name(from),
            to: name(to),
            at: self.network.node_name(choices.at).into(),
            choices: choices.links.len(),
            first: self.network.link_name(choices.links[0]).into(),
            second: self.network.link_name(choices.links[1]).into(),
        }
    }
}

const SALT: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64 finaliser: every result bit depends on every input bit.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}
