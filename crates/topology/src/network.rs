//! Network: nodes, directed links and endpoints as a value.

use crate::adjacency::Adjacency;
use crate::error::{Error, Result, hint};
use std::collections::HashMap;
use std::sync::Arc;

pub use crate::ids::{EndpointId, LinkId, NodeId};
pub(crate) use crate::links::BYTES_PER_GIGABIT;
pub use crate::links::{LinkInfo, LinkSpec};

/// Node kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeKind {
    /// Message source and destination: one rank's GPU with its NIC.
    Endpoint,
    /// Forwards between hosts.
    Switch,
    /// Forwards inside a host: NVLink, PCIe, or the way to a NIC that several GPUs share.
    Host,
}

/// A node.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Node {
    pub name: String,
    pub kind: NodeKind,
    /// True if it forwards messages for other nodes; always true for switches and hosts.
    pub forwards: bool,
    /// An endpoint's host name.
    pub host: Option<String>,
}

/// Explicit routing table entry: at `node`, messages for `to` go to `via`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Node that has the entry.
    pub node: NodeId,
    /// Destination; `None`: all that have no entry at the node.
    pub to: Option<EndpointId>,
    /// Next hop, a neighbour.
    pub via: NodeId,
}

/// Maximum node count in a network.
pub const MAX_NODES: u64 = 1 << 20;
/// Maximum directed link count in a network.
pub const MAX_LINKS: u64 = 1 << 22;

#[derive(Debug, PartialEq)]
pub(crate) struct Graph {
    pub name: String,
    pub nodes: Vec<Node>,
    pub links: Vec<LinkInfo>,
    pub endpoints: Vec<NodeId>,
    pub routes: Vec<Route>,
    pub rank_map: Option<Vec<EndpointId>>,
    /// Each node's outgoing links, in the order in which they were added.
    pub out: Adjacency,
    /// Incoming links of each node.
    pub into: Adjacency,
}

/// A network of endpoints, switches, hosts and directed links. Immutable; clones share it.
///
/// Made by a builder ([`BiGraph`](crate::BiGraph), [`FatTree`](crate::FatTree),
/// [`FatTree3`](crate::FatTree3), [`Rail`](crate::Rail)), from JSON, or node by node with a
/// [`NetworkBuilder`](crate::NetworkBuilder). Invariant: each endpoint reaches each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    pub(crate) graph: Arc<Graph>,
}

impl Network {
    /// Name of the network.
    pub fn name(&self) -> &str {
        &self.graph.name
    }

    /// The number of endpoints.
    pub fn endpoints(&self) -> u32 {
        self.graph.endpoints.len() as u32
    }

    /// Node count over all kinds.
    pub fn nodes(&self) -> u32 {
        self.graph.nodes.len() as u32
    }

    /// All directed links; a [`LinkId`] is an index into them.
    pub fn links(&self) -> &[LinkInfo] {
        &self.graph.links
    }

    /// One link.
    ///
    /// # Panics
    /// If the link is not in this network.
    pub fn link(&self, link: LinkId) -> &LinkInfo {
        &self.graph.links[link.0 as usize]
    }

    /// An endpoint's node.
    ///
    /// # Panics
    /// If the endpoint is not in this network.
    pub fn endpoint(&self, endpoint: EndpointId) -> NodeId {
        self.graph.endpoints[endpoint.0 as usize]
    }

    /// Node name.
    ///
    /// # Panics
    /// If the node is not in this network.
    pub fn node_name(&self, node: NodeId) -> &str {
        &self.graph.nodes[node.0 as usize].name
    }

    /// Node kind.
    ///
    /// # Panics
    /// If the node is not in this network.
    pub fn kind(&self, node: NodeId) -> NodeKind {
        self.graph.nodes[node.0 as usize].kind
    }

    /// Endpoint name.
    ///
    /// # Panics
    /// If the endpoint is not in this network.
    pub fn endpoint_name(&self, endpoint: EndpointId) -> &str {
        self.node_name(self.endpoint(endpoint))
    }

    /// An endpoint's host name; the endpoint's own name by default.
    ///
    /// # Panics
    /// If the endpoint is not in this network.
    pub fn host(&self, endpoint: EndpointId) -> &str {
        let node = &self.graph.nodes[self.endpoint(endpoint).0 as usize];
        node.host.as_deref().unwrap_or(&node.name)
    }

    /// Endpoints on each host; hosts in the order of their first endpoints.
    pub fn hosts(&self) -> Vec<(&str, Vec<EndpointId>)> {
        let mut indices = HashMap::new();
        let mut hosts: Vec<(&str, Vec<EndpointId>)> = Vec::new();
        for endpoint in (0..self.endpoints()).map(EndpointId) {
            let name = self.host(endpoint);
            let index = *indices.entry(name).or_insert_with(|| {
                hosts.push((name, Vec::new()));
                hosts.len() - 1
            });
            hosts[index].1.push(endpoint);
        }
        hosts
    }

    /// A node's outgoing links.
    ///
    /// # Panics
    /// If the node is not in this network.
    pub fn links_from(&self, node: NodeId) -> &[LinkId] {
        self.graph.out.of(node)
    }

    /// A node's incoming links.
    ///
    /// # Panics
    /// If the node is not in this network.
    pub fn links_to(&self, node: NodeId) -> &[LinkId] {
        self.graph.into.of(node)
    }

    /// Links from one node to another; several with trunks.
    pub fn links_between(&self, from: NodeId, to: NodeId) -> impl Iterator<Item = LinkId> {
        self.links_from(from).iter().copied().filter(move |&link| self.link(link).to == to)
    }

    /// The node with this name.
    pub fn find(&self, name: &str) -> Option<NodeId> {
        let place = self.graph.nodes.iter().position(|node| node.name == name)?;
        Some(NodeId(place as u32))
    }

    /// The endpoint with this name or number.
    ///
    /// # Errors
    /// If there is none.
    pub fn find_endpoint(&self, name: &str) -> Result<EndpointId> {
        if let Some(node) = self.find(name) {
            let place = self.graph.endpoints.iter().position(|&endpoint| endpoint == node);
            return place.map(|place| EndpointId(place as u32)).ok_or_else(|| Error::Field {
                at: name.to_owned(),
                reason: "not an endpoint".to_owned(),
            });
        }
        match name.parse() {
            Ok(endpoint) if endpoint < self.endpoints() => Ok(EndpointId(endpoint)),
            Ok(endpoint) => {
                Err(Error::EndpointOutOfRange { endpoint, endpoints: self.endpoints() })
            }
            Err(_) => Err(Error::UnknownNode {
                at: "the network".to_owned(),
                name: name.to_owned(),
                hint: hint(name, self.graph.nodes.iter().map(|node| node.name.as_str())),
            }),
        }
    }

    /// Link name: `U0->L3`, or `U0->L3#2` for the second among parallel links.
    ///
    /// # Panics
    /// If the link is not in this network.
    pub fn link_name(&self, link: LinkId) -> String {
        let info = self.link(link);
        let name = format!("{}->{}", self.node_name(info.from), self.node_name(info.to));
        match self.links_between(info.from, info.to).position(|other| other == link) {
            Some(place) if place > 0 => format!("{name}#{}", place + 1),
            _ => name,
        }
    }

    /// Explicit routes, which static routing follows.
    pub fn routes(&self) -> &[Route] {
        &self.graph.routes
    }

    /// Each rank's endpoint: the description's rank map, or all endpoints in order.
    pub fn rank_map(&self) -> Vec<EndpointId> {
        self.graph
            .rank_map
            .clone()
            .unwrap_or_else(|| (0..self.endpoints()).map(EndpointId).collect())
    }

    /// True if the description has a rank map.
    pub fn has_rank_map(&self) -> bool {
        self.graph.rank_map.is_some()
    }

    /// The same network with another rank map: rank `r` is endpoint `map[r]`.
    ///
    /// # Errors
    /// [`Error::BadRankMap`] for an endpoint with two ranks; [`Error::EndpointOutOfRange`].
    pub fn with_rank_map(&self, map: Vec<EndpointId>) -> Result<Network> {
        check_rank_map(&map, self.endpoints())?;
        Ok(self.with(self.graph.nodes.clone(), Some(map)))
    }

    /// The same network with these hosts for endpoints.
    ///
    /// # Panics
    /// If an endpoint is not in this network.
    pub(crate) fn with_hosts<'a>(
        &self,
        hosts: impl IntoIterator<Item = (EndpointId, &'a str)>,
    ) -> Network {
        let mut nodes = self.graph.nodes.clone();
        for (endpoint, host) in hosts {
            nodes[self.endpoint(endpoint).0 as usize].host = Some(host.to_owned());
        }
        self.with(nodes, self.graph.rank_map.clone())
    }

    fn with(&self, nodes: Vec<Node>, rank_map: Option<Vec<EndpointId>>) -> Network {
        let graph = &self.graph;
        Network {
            graph: Arc::new(Graph {
                name: graph.name.clone(),
                links: graph.links.clone(),
                endpoints: graph.endpoints.clone(),
                routes: graph.routes.clone(),
                rank_map,
                out: Adjacency::new(nodes.len(), &graph.links, |link| link.from),
                into: Adjacency::new(nodes.len(), &graph.links, |link| link.to),
                nodes,
            }),
        }
    }
}

pub(crate) fn check_rank_map(map: &[EndpointId], endpoints: u32) -> Result<()> {
    let mut taken = vec![None; endpoints as usize];
    for (rank, endpoint) in map.iter().enumerate() {
        let Some(place) = taken.get_mut(endpoint.0 as usize) else {
            return Err(Error::EndpointOutOfRange { endpoint: endpoint.0, endpoints });
        };
        if let Some(first) = place.replace(rank) {
            let reason = format!("ranks {first} and {rank} are both at {endpoint}");
            return Err(Error::BadRankMap { reason });
        }
    }
    Ok(())
}

/// Checks a size against a limit.
pub(crate) fn limit(what: &'static str, needed: u128, limit: u64) -> Result<()> {
    if needed > u128::from(limit) {
        return Err(Error::TooLarge { what, needed, limit });
    }
    Ok(())
}

/// Checks a count to be at least 1 and at most [`MAX_NODES`], so that products fit into 128 bits.
pub(crate) fn counted(what: &'static str, value: u32) -> Result<()> {
    if value == 0 {
        return Err(Error::Count { what: what.to_owned(), value: 0, must: "at least 1" });
    }
    limit(what, value.into(), MAX_NODES)
}
