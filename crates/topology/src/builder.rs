//! Network builder, node by node.

use crate::adjacency::Adjacency;
use crate::error::{Error, Result, hint};
use crate::names::{MAX_NAME, TOO_LONG};
use crate::network::{
    EndpointId, Graph, LinkId, LinkInfo, LinkSpec, MAX_LINKS, MAX_NODES, Network, Node, NodeId,
    NodeKind, Route, check_rank_map, limit,
};
use crate::reach;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// Builder for a [`Network`], node by node.
#[derive(Debug, Default)]
pub struct NetworkBuilder {
    name: String,
    nodes: Vec<Node>,
    by_name: HashMap<String, NodeId>,
    links: Vec<LinkInfo>,
    endpoints: Vec<NodeId>,
    routes: Vec<Route>,
    rank_map: Option<Vec<EndpointId>>,
}

impl NetworkBuilder {
    /// Empty network with this name.
    pub fn new(name: impl Into<String>) -> NetworkBuilder {
        NetworkBuilder { name: name.into(), ..NetworkBuilder::default() }
    }

    /// Empty network with capacity for `nodes` and `links`.
    pub(crate) fn with_room(name: String, nodes: usize, links: usize) -> NetworkBuilder {
        NetworkBuilder {
            name,
            nodes: Vec::with_capacity(nodes),
            by_name: HashMap::with_capacity(nodes),
            links: Vec::with_capacity(links),
            ..NetworkBuilder::default()
        }
    }

    /// Adds a switch.
    pub fn switch(&mut self, name: impl Into<String>) -> Result<NodeId> {
        self.node(name.into(), NodeKind::Switch, true, None)
    }

    /// Adds a forwarding node inside a host: NVLink, PCIe, a shared NIC.
    pub fn host(&mut self, name: impl Into<String>) -> Result<NodeId> {
        self.node(name.into(), NodeKind::Host, true, None)
    }

    /// Adds an endpoint, the next in number, with its host name.
    pub fn endpoint(&mut self, name: impl Into<String>, host: Option<&str>) -> Result<NodeId> {
        self.node(name.into(), NodeKind::Endpoint, false, host)
    }

    /// Adds an endpoint that also forwards, as a GPU does whose NIC the NVLink neighbours use.
    pub fn forwarding_endpoint(
        &mut self,
        name: impl Into<String>,
        host: Option<&str>,
    ) -> Result<NodeId> {
        self.node(name.into(), NodeKind::Endpoint, true, host)
    }

    fn node(
        &mut self,
        name: String,
        kind: NodeKind,
        forwards: bool,
        host: Option<&str>,
    ) -> Result<NodeId> {
        let at = || format!("node {}", self.nodes.len());
        if let Some(reason) = refused(&name) {
            return Err(Error::BadName { at: at(), name, reason });
        }
        if let Some((host, reason)) = host.and_then(|host| Some((host, refused(host)?))) {
            return Err(Error::BadName { at: at(), name: host.to_owned(), reason });
        }
        let node = NodeId(self.nodes.len() as u32);
        match self.by_name.entry(name.clone()) {
            Entry::Occupied(_) => return Err(Error::DuplicateName { at: at(), name }),
            Entry::Vacant(free) => {
                limit("nodes", self.nodes.len() as u128 + 1, MAX_NODES)?;
                free.insert(node);
            }
        }
        self.nodes.push(Node { name, kind, forwards, host: host.map(str::to_owned) });
        if kind == NodeKind::Endpoint {
            self.endpoints.push(node);
        }
        Ok(node)
    }

    /// The node with this name.
    pub fn find(&self, name: &str) -> Option<NodeId> {
        self.by_name.get(name).copied()
    }

    /// The node with this name, or an error with the position `at` in the input.
    pub(crate) fn named(&self, name: &str, at: impl FnOnce() -> String) -> Result<NodeId> {
        self.find(name).ok_or_else(|| Error::UnknownNode {
            at: at(),
            name: name.to_owned(),
            hint: hint(name, self.nodes.iter().map(|node| node.name.as_str())),
        })
    }

    /// Adds a cable: two links, first the one from `one` to `other`.
    pub fn cable(&mut self, one: NodeId, other: NodeId, spec: LinkSpec) -> Result<LinkId> {
        let there = self.link(one, other, spec)?;
        let back = self.link(other, one, spec)?;
        self.links[there.0 as usize].reverse = Some(back);
        self.links[back.0 as usize].reverse = Some(there);
        Ok(there)
    }

    /// Adds a link in one direction.
    pub fn link(&mut self, from: NodeId, to: NodeId, spec: LinkSpec) -> Result<LinkId> {
        let name = |node: NodeId| self.nodes.get(node.0 as usize).map(|node| node.name.as_str());
        let at = || format!("link {}", self.links.len());
        let (Some(first), Some(second)) = (name(from), name(to)) else {
            let node = if name(from).is_none() { from } else { to };
            let name = format!("#{}", node.0);
            return Err(Error::UnknownNode { at: at(), name, hint: String::new() });
        };
        if from == to {
            return Err(Error::SelfLink { at: at(), name: first.to_owned() });
        }
        let spec = spec.checked(|| format!("{} from {first:?} to {second:?}", at()))?;
        limit("directed links", self.links.len() as u128 + 1, MAX_LINKS)?;
        let link = LinkId(self.links.len() as u32);
        let LinkSpec { bandwidth, latency } = spec;
        self.links.push(LinkInfo { from, to, bandwidth, latency, reverse: None });
        Ok(link)
    }

    /// Adds an entry to an explicit routing table, checked by [`finish`](NetworkBuilder::finish).
    pub fn route(&mut self, route: Route) {
        self.routes.push(route);
    }

    /// Sets each rank's endpoint, checked by [`finish`](NetworkBuilder::finish).
    pub fn rank_map(&mut self, map: Vec<EndpointId>) {
        self.rank_map = Some(map);
    }

    /// Node kinds so far.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = NodeKind> {
        self.nodes.iter().map(|node| node.kind)
    }

    /// Number of routes so far.
    pub(crate) fn routes(&self) -> usize {
        self.routes.len()
    }

    /// Number of endpoints so far.
    pub fn endpoints(&self) -> u32 {
        self.endpoints.len() as u32
    }

    /// The network, once every endpoint is checked to reach every other.
    ///
    /// # Errors
    /// [`Error::NoEndpoints`], [`Error::Unreachable`], [`Error::BadRoute`], [`Error::BadRankMap`].
    pub fn finish(self) -> Result<Network> {
        if self.endpoints.is_empty() {
            return Err(Error::NoEndpoints);
        }
        if let Some(map) = &self.rank_map {
            check_rank_map(map, self.endpoints.len() as u32)?;
        }
        let out = Adjacency::new(self.nodes.len(), &self.links, |link| link.from);
        let into = Adjacency::new(self.nodes.len(), &self.links, |link| link.to);
        let NetworkBuilder { name, nodes, links, endpoints, routes, rank_map, .. } = self;
        let graph = Graph { name, nodes, links, endpoints, routes, rank_map, out, into };
        reach::check(&graph)?;
        reach::check_routes(&graph)?;
        Ok(Network { graph: Arc::new(graph) })
    }
}

/// Reason why a text is no valid node name.
fn refused(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("expected at least one character")
    } else if name.len() > MAX_NAME {
        Some(TOO_LONG)
    } else if name.contains(|c: char| c.is_control() || matches!(c, '[' | ']' | '*' | ',' | '"')) {
        Some("brackets, commas, quotes, asterisks and control characters are reserved")
    } else {
        None
    }
}
