//! Links between nodes of the core.

use super::next_hops::NONE;
use crate::adjacency::Adjacency;
use crate::network::{LinkId, NodeId};

/// Links of each node of the core to others of the core, each with the index of the other end.
#[derive(Clone, Debug)]
pub struct CoreLinks {
    /// Start of each node's list, and the end of the last.
    first: Vec<u32>,
    lists: Vec<(LinkId, u32)>,
}

impl CoreLinks {
    /// From an adjacency; `other` returns the index of a link's other end in the core.
    pub fn new(core: &[NodeId], adjacency: &Adjacency, other: impl Fn(LinkId) -> u32) -> CoreLinks {
        let mut neighbours = CoreLinks { first: vec![0], lists: Vec::new() };
        for &node in core {
            let links = adjacency.of(node).iter().map(|&link| (link, other(link)));
            neighbours.lists.extend(links.filter(|&(_, place)| place != NONE));
            neighbours.first.push(neighbours.lists.len() as u32);
        }
        neighbours
    }

    pub fn of(&self, place: u32) -> &[(LinkId, u32)] {
        let place = place as usize;
        &self.lists[self.first[place] as usize..self.first[place + 1] as usize]
    }
}
