//! The core's own links.

use super::next_hops::NONE;
use crate::adjacency::Adjacency;
use crate::network::{LinkId, NodeId};

/// For each node of the core, links that join it with others of the core, and the places of these.
#[derive(Clone, Debug)]
pub struct Neighbours {
    /// Where the list of each node begins, and the end of the last one.
    first: Vec<u32>,
    lists: Vec<(LinkId, u32)>,
}

impl Neighbours {
    /// Links by an adjacency, of which `other` gives the place of the other end.
    pub fn new(
        core: &[NodeId],
        adjacency: &Adjacency,
        other: impl Fn(LinkId) -> u32,
    ) -> Neighbours {
        let mut neighbours = Neighbours { first: vec![0], lists: Vec::new() };
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
