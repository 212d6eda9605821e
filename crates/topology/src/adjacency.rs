//! Adjacency lists in compressed sparse row form.

use crate::ids::{LinkId, NodeId};
use crate::links::LinkInfo;

/// Links by node: node `n` has `links[first[n]..first[n + 1]]`.
#[derive(Debug, PartialEq)]
pub(crate) struct Adjacency {
    first: Vec<u32>,
    links: Vec<LinkId>,
}

impl Adjacency {
    pub fn new(nodes: usize, links: &[LinkInfo], end: impl Fn(&LinkInfo) -> NodeId) -> Adjacency {
        let mut first = vec![0u32; nodes + 1];
        for link in links {
            first[end(link).0 as usize + 1] += 1;
        }
        for node in 0..nodes {
            first[node + 1] += first[node];
        }
        let mut next = first.clone();
        let mut lists = vec![LinkId(0); links.len()];
        for (number, link) in links.iter().enumerate() {
            let free = &mut next[end(link).0 as usize];
            lists[*free as usize] = LinkId(number as u32);
            *free += 1;
        }
        Adjacency { first, links: lists }
    }

    pub fn of(&self, node: NodeId) -> &[LinkId] {
        let node = node.0 as usize;
        &self.links[self.first[node] as usize..self.first[node + 1] as usize]
    }
}
