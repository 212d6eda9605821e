//! Links between core nodes.

use super::places::NONE;
use crate::adjacency::Adjacency;
use crate::network::{LinkId, NodeId};

/// Links from each core node to others in the core, each with the index at the other end.
#[derive(Clone, Debug)]
pub struct CoreLinks {
    /// Start of each node's list, and the end of the last.
    first: Vec<u32>,
    lists: Vec<(LinkId, u32)>,
}

impl CoreLinks {
    /// From an adjacency; `other` returns the core index at a link's other end.
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
