//! Which links of a node lie on a shortest path to a destination.

use super::neighbours::Neighbours;
use super::sets::Sets;
use crate::network::{EndpointId, LinkId, Network, NodeId};
use std::collections::VecDeque;

/// No way from here to there; also: not a node of the core.
pub const NONE: u32 = u32::MAX;

/// The most words of tables that are kept (1 GiB); where more are wanted, all are made anew.
const MAX_WORDS: usize = 1 << 28;

/// Tables of next hops, made when a destination is first asked for.
///
/// An endpoint with one cable that does not forward (nearly all are such) is left out: its paths are those
/// of the switch that it hangs on. What remains is the core. For each destination in it there is a table with
/// a word for each node of the core: a link, or the number of a set of links. Sets are shared: a leaf of a fat
/// tree has one ("any spine") for all destinations, so tables stay small and a hop is two loads.
#[derive(Clone, Debug)]
pub struct NextHops {
    /// Nodes of the core.
    core: Vec<NodeId>,
    /// The place in the core of each node, or [`NONE`].
    places: Vec<u32>,
    /// Links of the core that leave each node of it, and those that enter.
    leaving: Neighbours,
    entering: Neighbours,
    /// Whether each node of the core passes on what is not for itself.
    forwards: Vec<bool>,
    /// Where each endpoint enters the core.
    doors: Vec<Door>,
    /// The place in the core of where each link leads.
    heads: Vec<u32>,
    tables: Vec<Option<Box<[u32]>>>,
    /// Tables that are there.
    made: usize,
    sets: Sets,
    /// What the name of each node of the core hashes to.
    keys: Vec<u64>,
    /// What a destination's number is divided by before it picks a link, for each node of the core.
    divisors: Vec<u64>,
    out: Vec<bool>,
}

/// How an endpoint enters the core.
#[derive(Clone, Copy, Debug)]
pub struct Door {
    /// The place in the core.
    pub node: u32,
    /// The link to there, unless the endpoint is in the core itself.
    pub up: Option<LinkId>,
    /// The link back.
    pub down: Option<LinkId>,
}

/// The links to choose from at a node.
pub struct Choices<'a> {
    /// The node.
    pub at: NodeId,
    /// What the node's name hashes to, so that its choices do not depend on how nodes are numbered.
    pub key: u64,
    /// Those of its links that lie on a shortest path, at least one.
    pub links: &'a [LinkId],
    divisor: u64,
}

impl Choices<'_> {
    /// The place of the link that D-mod-k takes.
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
        let mut doors = vec![Door { node: NONE, up: None, down: None }; graph.endpoints.len()];
        let mut hanging = vec![false; graph.nodes.len()];
        for (door, &endpoint) in doors.iter_mut().zip(&graph.endpoints) {
            let (out, into) = (graph.out.of(endpoint), graph.into.of(endpoint));
            let ([up], [down]) = (out, into) else { continue };
            let above = network.link(*up).to;
            // An endpoint beside an endpoint stays, so that what it hangs on is always in the core.
            let can_stay_out = network.link(*down).from == above
                && graph.nodes[above.0 as usize].forwards
                && !graph.nodes[endpoint.0 as usize].forwards;
            if can_stay_out {
                hanging[endpoint.0 as usize] = true;
                *door = Door { node: above.0, up: Some(*up), down: Some(*down) };
            }
        }
        let core: Vec<NodeId> =
            (0..graph.nodes.len()).filter(|&node| !hanging[node]).map(super::node).collect();
        for (place, node) in core.iter().enumerate() {
            places[node.0 as usize] = place as u32;
        }
        for (door, endpoint) in doors.iter_mut().zip(&graph.endpoints) {
            let node = if door.up.is_some() { door.node } else { endpoint.0 };
            door.node = places[node as usize];
        }
        let place = |node: NodeId| places[node.0 as usize];
        NextHops {
            leaving: Neighbours::new(&core, &graph.out, |link| place(network.link(link).to)),
            entering: Neighbours::new(&core, &graph.into, |link| place(network.link(link).from)),
            forwards: core.iter().map(|&node| graph.nodes[node.0 as usize].forwards).collect(),
            heads: graph.links.iter().map(|link| places[link.to.0 as usize]).collect(),
            tables: vec![None; core.len()],
            made: 0,
            sets: Sets::new(graph.links.len(), core.len()),
            keys: core.iter().map(|&node| key(network.node_name(node))).collect(),
            divisors: divisors(network, &core),
            out: vec![false; graph.links.len()],
            places,
            core,
            doors,
        }
    }

    /// A node's place in the core, or [`NONE`].
    pub fn place(&self, node: NodeId) -> u32 {
        self.places[node.0 as usize]
    }

    #[inline]
    pub fn door(&self, endpoint: EndpointId) -> Door {
        self.doors[endpoint.0 as usize]
    }

    /// The place in the core of where a link leads.
    #[inline]
    pub fn head(&self, link: LinkId) -> u32 {
        self.heads[link.0 as usize]
    }

    #[inline]
    pub fn is_out(&self, link: LinkId) -> bool {
        self.out[link.0 as usize]
    }

    /// Takes a link out or puts it back; what was known of ways is forgotten.
    pub fn set_out(&mut self, link: LinkId, out: bool) {
        if self.out[link.0 as usize] != out {
            self.out[link.0 as usize] = out;
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

    /// Makes the table of a destination in the core if this is the first time that it is wanted.
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

    /// The table of a destination in the core, once it was prepared.
    #[inline]
    pub fn table(&self, target: u32) -> &[u32] {
        self.tables[target as usize].as_deref().unwrap_or_default()
    }

    /// Links from each node of the core to the target, and the nodes in rising order of them.
    fn distances(&self, target: u32) -> (Vec<u32>, Vec<u32>) {
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
                if *distance == NONE && !self.out[link.0 as usize] {
                    *distance = further;
                    order.push(from);
                }
            }
        }
        (distances, order)
    }

    /// Links of a node of the core that lead nearer to the target.
    fn nearer(&self, place: u32, target: u32, distances: &[u32], links: &mut Vec<LinkId>) {
        links.clear();
        let (forwards, out) = (&self.forwards[..], &self.out[..]);
        let nearer = distances[place as usize] - 1;
        for &(link, head) in self.leaving.of(place) {
            if distances[head as usize] == nearer
                && (head == target || forwards[head as usize])
                && !out[link.0 as usize]
            {
                links.push(link);
            }
        }
    }

    fn make(&mut self, target: u32) -> Box<[u32]> {
        let (distances, order) = self.distances(target);
        let mut table = vec![NONE; self.core.len()].into_boxed_slice();
        let mut links = Vec::new();
        for &place in &order[1..] {
            self.nearer(place, target, &distances, &mut links);
            table[place as usize] = self.sets.number(place, &links);
        }
        table
    }

    /// The number of shortest paths and their length.
    pub fn count(&self, from: EndpointId, to: EndpointId) -> Option<(u64, u32)> {
        let (start, target) = (self.door(from), self.door(to));
        let ends = [start.up, target.down];
        if ends.into_iter().flatten().any(|link| self.is_out(link)) {
            return None;
        }
        let (distances, order) = self.distances(target.node);
        let mut counts = vec![0u64; self.core.len()];
        counts[target.node as usize] = 1;
        let mut links = Vec::new();
        for &place in &order[1..] {
            self.nearer(place, target.node, &distances, &mut links);
            let ways = links.iter().map(|&link| counts[self.head(link) as usize]);
            counts[place as usize] = ways.fold(0, u64::saturating_add);
        }
        let length = distances[start.node as usize];
        let ends = ends.iter().flatten().count() as u32;
        (length != NONE).then(|| (counts[start.node as usize], length + ends))
    }
}

/// FNV-1a, which is the same everywhere and always.
fn key(name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

/// For each node of the core, the product of the ways up of the levels below its own.
///
/// A node's level is its distance from the nearest endpoint. On a fat tree this makes leaves pick their way
/// up by the destination's lowest digit, the next tier by the second, and so on: D-mod-k.
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
    // Endpoints of the core choose by the lowest digit too, so level 0 does not count.
    let divisor = |node: &NodeId| {
        let level = (levels[node.0 as usize] as usize).min(ways_up.len());
        ways_up[..level].iter().skip(1).fold(1, |product: u64, ways| product.saturating_mul(*ways))
    };
    core.iter().map(divisor).collect()
}
