//! Next hops: each node's links on shortest paths to a destination.

use super::core_links::CoreLinks;
use super::link_sets::LinkSets;
use super::places::NONE;
use crate::network::{EndpointId, LinkId, Network, NodeId, NodeKind};
use std::collections::VecDeque;

/// Limit on cached tables in words (1 GiB); beyond it the cache is cleared.
const MAX_WORDS: usize = 1 << 28;

/// Next hop tables, made when a destination is first used.
///
/// The core is the network without the endpoints that have one cable and do not forward (nearly all): their paths are
/// the same as their switch's. Each destination in the core has a table with a word for each core node: a link, or a
/// link set number. Sets are shared: a leaf in a fat tree has one ("any spine") for all destinations, so tables stay
/// small and a hop is two loads.
#[derive(Clone, Debug)]
pub struct NextHops {
    /// Core nodes.
    core: Vec<NodeId>,
    /// Each node's core index, or [`NONE`].
    places: Vec<u32>,
    /// Links between core nodes, outgoing and incoming.
    leaving: CoreLinks,
    entering: CoreLinks,
    /// Core nodes that forward.
    forwards: Vec<bool>,
    /// Core nodes that are endpoints or host parts, not switches.
    in_hosts: Vec<bool>,
    /// Each endpoint's entry into the core.
    entries: Vec<CoreEntry>,
    /// Core index at each link's head.
    heads: Vec<u32>,
    tables: Vec<Option<Box<[u32]>>>,
    /// Number of cached tables.
    made: usize,
    sets: LinkSets,
    /// Name hash for each core node.
    keys: Vec<u64>,
    /// Divisor for a destination's number before the D-mod-k modulo, for each core node.
    divisors: Vec<u64>,
    failed: Vec<bool>,
}

/// An endpoint's entry into the core.
#[derive(Clone, Copy, Debug)]
pub struct CoreEntry {
    /// Index in the core.
    pub node: u32,
    /// Link to it; `None` for an endpoint in the core.
    pub up: Option<LinkId>,
    /// Link back.
    pub down: Option<LinkId>,
}

/// Distances from the core nodes to one target.
struct Distances {
    /// Number of links from each node to the target, or [`NONE`].
    links: Vec<u32>,
    /// Nodes that reach the target, by distance.
    order: Vec<u32>,
    /// Nodes with a shortest path to the target that crosses no switch; known once a node was visited.
    inner: Vec<bool>,
}

/// A node's next hops toward a destination.
pub struct Choices<'a> {
    /// The node.
    pub at: NodeId,
    /// Node name hash, so that choices do not depend on node numbers.
    pub key: u64,
    /// Links on shortest paths, at least one.
    pub links: &'a [LinkId],
    divisor: u64,
}

impl Choices<'_> {
    /// Index that D-mod-k chooses.
    pub fn by_destination(&self, to: EndpointId) -> usize {
        if self.links.len() == 1 {
            return 0;
        }
        (u64::from(to.0) / self.divisor % self.links.len() as u64) as usize
    }
}

impl NextHops {
    pub fn new(network: &Network) -> NextHops {
        let graph = &network.graph;
        let mut places = vec![NONE; graph.nodes.len()];
        let mut entries =
            vec![CoreEntry { node: NONE, up: None, down: None }; graph.endpoints.len()];
        let mut hanging = vec![false; graph.nodes.len()];
        for (entry, &endpoint) in entries.iter_mut().zip(&graph.endpoints) {
            let (out, into) = (graph.out.of(endpoint), graph.into.of(endpoint));
            let ([up], [down]) = (out, into) else { continue };
            let above = network.link(*up).to;
            // An endpoint next to an endpoint stays in the core, so that an entry always is.
            let can_stay_out = network.link(*down).from == above
                && graph.nodes[above.0 as usize].forwards
                && !graph.nodes[endpoint.0 as usize].forwards;
            if can_stay_out {
                hanging[endpoint.0 as usize] = true;
                *entry = CoreEntry { node: above.0, up: Some(*up), down: Some(*down) };
            }
        }
        let core: Vec<NodeId> = (0..graph.nodes.len())
            .filter(|&node| !hanging[node])
            .map(super::places::node)
            .collect();
        for (place, node) in core.iter().enumerate() {
            places[node.0 as usize] = place as u32;
        }
        for (entry, endpoint) in entries.iter_mut().zip(&graph.endpoints) {
            let node = if entry.up.is_some() { entry.node } else { endpoint.0 };
            entry.node = places[node as usize];
        }
        let place = |node: NodeId| places[node.0 as usize];
        NextHops {
            leaving: CoreLinks::new(&core, &graph.out, |link| place(network.link(link).to)),
            entering: CoreLinks::new(&core, &graph.into, |link| place(network.link(link).from)),
            forwards: core.iter().map(|&node| graph.nodes[node.0 as usize].forwards).collect(),
            in_hosts: core.iter().map(|&node| network.kind(node) != NodeKind::Switch).collect(),
            heads: graph.links.iter().map(|link| places[link.to.0 as usize]).collect(),
            tables: vec![None; core.len()],
            made: 0,
            sets: LinkSets::new(graph.links.len(), core.len()),
            keys: core.iter().map(|&node| key(network.node_name(node))).collect(),
            divisors: divisors(network, &core),
            failed: vec![false; graph.links.len()],
            places,
            core,
            entries,
        }
    }

    /// A node's core index, or [`NONE`].
    pub fn place(&self, node: NodeId) -> u32 {
        self.places[node.0 as usize]
    }

    #[inline]
    pub fn entry(&self, endpoint: EndpointId) -> CoreEntry {
        self.entries[endpoint.0 as usize]
    }

    /// Core index at a link's head.
    #[inline]
    pub fn head(&self, link: LinkId) -> u32 {
        self.heads[link.0 as usize]
    }

    #[inline]
    pub fn is_failed(&self, link: LinkId) -> bool {
        self.failed[link.0 as usize]
    }

    /// Marks a link as failed or restored, and clears the tables.
    pub fn set_failed(&mut self, link: LinkId, failed: bool) {
        if self.failed[link.0 as usize] != failed {
            self.failed[link.0 as usize] = failed;
            self.tables.fill(None);
            self.made = 0;
        }
    }

    #[inline]
    pub fn choices(&self, at: u32, set: u32) -> Choices<'_> {
        Choices {
            at: self.core[at as usize],
            key: self.keys[at as usize],
            links: self.sets.links(set),
            divisor: self.divisors[at as usize],
        }
    }

    /// Makes the table for a destination in the core, unless it is cached.
    #[inline]
    pub fn prepare(&mut self, target: u32) {
        if self.tables[target as usize].is_none() {
            if self.made >= MAX_WORDS / self.core.len() {
                self.tables.fill(None);
                self.made = 0;
            }
            self.made += 1;
            self.tables[target as usize] = Some(self.make(target));
        }
    }

    /// Table for a destination, after [`prepare`](NextHops::prepare).
    #[inline]
    pub fn table(&self, target: u32) -> &[u32] {
        self.tables[target as usize].as_deref().unwrap_or_default()
    }

    /// Breadth-first search from the target against the link direction.
    fn distances(&self, target: u32) -> Distances {
        let mut distances = vec![NONE; self.core.len()];
        let mut order = Vec::with_capacity(self.core.len());
        distances[target as usize] = 0;
        order.push(target);
        let mut done = 0;
        while let Some(&place) = order.get(done) {
            done += 1;
            if place != target && !self.forwards[place as usize] {
                continue;
            }
            let further = distances[place as usize] + 1;
            for &(link, from) in self.entering.of(place) {
                let distance = &mut distances[from as usize];
                if *distance == NONE && !self.failed[link.0 as usize] {
                    *distance = further;
                    order.push(from);
                }
            }
        }
        let mut inner = vec![false; self.core.len()];
        inner[target as usize] = self.in_hosts[target as usize];
        Distances { links: distances, order, inner }
    }

    /// A core node's next hops on shortest paths to the target; nodes are visited in distance order. Where a shortest
    /// path crosses no switch, only such paths are kept: traffic inside a host does not leave through a NIC.
    fn nearer(&self, place: u32, target: u32, distances: &mut Distances, links: &mut Vec<LinkId>) {
        links.clear();
        let (forwards, failed) = (&self.forwards[..], &self.failed[..]);
        let nearer = distances.links[place as usize] - 1;
        for &(link, head) in self.leaving.of(place) {
            if distances.links[head as usize] == nearer
                && (head == target || forwards[head as usize])
                && !failed[link.0 as usize]
            {
                links.push(link);
            }
        }
        if self.in_hosts[place as usize] {
            let inner = |link: &LinkId| distances.inner[self.head(*link) as usize];
            if links.iter().any(inner) {
                links.retain(inner);
                distances.inner[place as usize] = true;
            }
        }
    }

    fn make(&mut self, target: u32) -> Box<[u32]> {
        let mut distances = self.distances(target);
        let mut table = vec![NONE; self.core.len()].into_boxed_slice();
        let mut links = Vec::new();
        for number in 1..distances.order.len() {
            let place = distances.order[number];
            self.nearer(place, target, &mut distances, &mut links);
            table[place as usize] = self.sets.number(place, &links);
        }
        table
    }

    /// Number of shortest paths that routing may choose, and the path length.
    pub fn count(&self, from: EndpointId, to: EndpointId) -> Option<(u64, u32)> {
        let (start, target) = (self.entry(from), self.entry(to));
        let ends = [start.up, target.down];
        if ends.into_iter().flatten().any(|link| self.is_failed(link)) {
            return None;
        }
        let mut distances = self.distances(target.node);
        let mut counts = vec![0u64; self.core.len()];
        counts[target.node as usize] = 1;
        let mut links = Vec::new();
        for number in 1..distances.order.len() {
            let place = distances.order[number];
            self.nearer(place, target.node, &mut distances, &mut links);
            let ways = links.iter().map(|&link| counts[self.head(link) as usize]);
            counts[place as usize] = ways.fold(0, u64::saturating_add);
        }
        let length = distances.links[start.node as usize];
        let ends = ends.iter().flatten().count() as u32;
        (length != NONE).then(|| (counts[start.node as usize], length + ends))
    }
}

/// FNV-1a: does not depend on platform or version.
fn key(name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

/// For each core node, the product of the uplink counts at the levels below it.
///
/// A node's level is the distance from the nearest endpoint. On a fat tree, leaves thus choose an uplink by the
/// destination's lowest digit, the next tier by the second, and so on: D-mod-k.
fn divisors(network: &Network, core: &[NodeId]) -> Vec<u64> {
    let graph = &network.graph;
    let mut levels = vec![NONE; graph.nodes.len()];
    let mut left: VecDeque<NodeId> = graph.endpoints.iter().copied().collect();
    for node in &graph.endpoints {
        levels[node.0 as usize] = 0;
    }
    while let Some(node) = left.pop_front() {
        for link in graph.out.of(node) {
            let to = network.link(*link).to;
            if levels[to.0 as usize] == NONE {
                levels[to.0 as usize] = levels[node.0 as usize] + 1;
                left.push_back(to);
            }
        }
    }
    let mut ways_up: Vec<u64> = Vec::new();
    for &node in core {
        let level = levels[node.0 as usize];
        if level == NONE {
            continue;
        }
        let up = |link: &&LinkId| levels[network.link(**link).to.0 as usize] == level + 1;
        let ways = graph.out.of(node).iter().filter(up).count() as u64;
        let level = level as usize;
        if ways_up.len() <= level {
            ways_up.resize(level + 1, 1);
        }
        ways_up[level] = ways_up[level].max(ways);
    }
    // Endpoints in the core choose by the lowest digit too, so level 0 is skipped.
    let divisor = |node: &NodeId| {
        let level = (levels[node.0 as usize] as usize).min(ways_up.len());
        ways_up[..level].iter().skip(1).fold(1, |product: u64, ways| product.saturating_mul(*ways))
    };
    core.iter().map(divisor).collect()
}
