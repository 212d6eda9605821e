//! Warnings about hosts whose endpoints are as close to each other through switches as inside the host.

use crate::network::{EndpointId, Network, NodeId, NodeKind};
use std::collections::VecDeque;

/// Upper bound on links visited; the search ends there and reports what it found.
const MAX_VISITED: usize = 1 << 26;

/// Endpoints on one host whose shortest path through switches is no longer than the one inside the host.
struct EndpointPair {
    from: EndpointId,
    to: EndpointId,
    /// Links on the shortest path inside the host.
    inside: u32,
    /// Links on the shortest path through a switch.
    outside: u32,
}

/// The first pair of a kind, and how many hosts have one.
#[derive(Default)]
struct HostTally {
    first: Option<EndpointPair>,
    hosts: usize,
}

impl HostTally {
    fn add(&mut self, pair: Option<EndpointPair>) {
        self.hosts += usize::from(pair.is_some());
        self.first = self.first.take().or(pair);
    }
}

/// Warnings about hosts whose internal traffic can leave the host: a path through switches is as short as the path
/// inside (routing then takes the one inside), or shorter (routing leaves the host). One sentence for each kind, which
/// names the first endpoint pair.
pub(crate) fn warnings(network: &Network) -> Vec<String> {
    let inside = |node| network.kind(node) != NodeKind::Switch;
    if !network.links().iter().any(|link| inside(link.from) && inside(link.to)) {
        return Vec::new();
    }
    let mut search = Search::new(network);
    let (mut equal, mut shorter) = (HostTally::default(), HostTally::default());
    for (_, endpoints) in network.hosts() {
        let (mut tie, mut shortcut) = (None, None);
        for &from in &endpoints {
            for pair in search.pairs(from, &endpoints) {
                let kind = if pair.outside < pair.inside { &mut shortcut } else { &mut tie };
                kind.get_or_insert(pair);
            }
        }
        equal.add(tie);
        shorter.add(shortcut);
    }
    let shorter = sentence(
        network,
        &shorter,
        "routing leaves the host; join its endpoints by fewer links, or add routes",
    );
    let equal = sentence(network, &equal, "routing stays inside the host");
    shorter.into_iter().chain(equal).collect()
}

fn sentence(network: &Network, finding: &HostTally, consequence: &str) -> Option<String> {
    let EndpointPair { from, to, inside, outside } = finding.first.as_ref()?;
    Some(format!(
        "{} to {}: {inside} links inside host {}, {outside} through switches: {consequence}; hosts with \
         such endpoints: {}",
        network.endpoint_name(*from),
        network.endpoint_name(*to),
        network.host(*from),
        finding.hosts,
    ))
}

/// Breadth-first search over nodes, each with and without a switch behind it.
struct Search<'a> {
    network: &'a Network,
    /// Number of the search that reached a state last, and the distance there. State `2 n` is node `n` by a path inside
    /// the host, `2 n + 1` by a path that crossed a switch.
    reached: Vec<(u32, u32)>,
    number: u32,
    visited: usize,
}

impl Search<'_> {
    fn new(network: &Network) -> Search<'_> {
        let reached = vec![(0, 0); 2 * network.nodes() as usize];
        Search { network, reached, number: 0, visited: 0 }
    }

    /// Pairs from one endpoint on a host to later ones on the same host.
    fn pairs(&mut self, from: EndpointId, endpoints: &[EndpointId]) -> Vec<EndpointPair> {
        let later = || endpoints.iter().copied().filter(|&to| to > from);
        self.run(from, u32::MAX, false);
        let insides: Vec<_> =
            later().filter_map(|to| Some((to, self.distance(to, false)?))).collect();
        let Some(most) = insides.iter().map(|&(_, inside)| inside).max() else {
            return Vec::new();
        };
        self.run(from, most, true);
        let pair = |&(to, inside): &(EndpointId, u32)| {
            let outside = self.distance(to, true)?;
            (outside <= inside).then_some(EndpointPair { from, to, inside, outside })
        };
        insides.iter().filter_map(pair).collect()
    }

    /// An endpoint's distance in the last search.
    fn distance(&self, to: EndpointId, crossed: bool) -> Option<u32> {
        let state = 2 * self.network.endpoint(to).0 as usize + usize::from(crossed);
        let (number, distance) = self.reached[state];
        (number == self.number).then_some(distance)
    }

    /// Visits everything within `most` links from an endpoint; over switches only if `switches`.
    fn run(&mut self, from: EndpointId, most: u32, switches: bool) {
        self.number += 1;
        let start = self.network.endpoint(from);
        self.reached[2 * start.0 as usize] = (self.number, 0);
        let mut queue = VecDeque::from([(start, false, 0)]);
        while let Some((node, crossed, distance)) = queue.pop_front() {
            let forwards = node == start || self.network.graph.nodes[node.0 as usize].forwards;
            if distance == most || !forwards || self.visited >= MAX_VISITED {
                continue;
            }
            self.visited += self.network.links_from(node).len();
            for &link in self.network.links_from(node) {
                let next: NodeId = self.network.link(link).to;
                let switch = self.network.kind(next) == NodeKind::Switch;
                let state = 2 * next.0 as usize + usize::from(crossed || switch);
                if (switches || !switch) && self.reached[state].0 != self.number {
                    self.reached[state] = (self.number, distance + 1);
                    queue.push_back((next, crossed || switch, distance + 1));
                }
            }
        }
    }
}
