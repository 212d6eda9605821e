//! Next hop sets, shared between tables.

use super::places::NONE;
use crate::network::LinkId;
use std::collections::HashMap;

/// Link sets by number. A set with one link has the link's own number.
#[derive(Clone, Debug)]
pub struct LinkSets {
    links: Vec<LinkId>,
    /// Range for each set in `links`.
    spans: Vec<(u32, u32)>,
    /// All network links in order: a set with one link is a slice from it.
    singles: Vec<LinkId>,
    by_links: HashMap<Box<[LinkId]>, u32>,
    /// Each node's last set, checked first.
    last: Vec<u32>,
}

impl LinkSets {
    pub fn new(links: usize, nodes: usize) -> LinkSets {
        LinkSets {
            links: Vec::new(),
            spans: Vec::new(),
            singles: (0..links as u32).map(LinkId).collect(),
            by_links: HashMap::new(),
            last: vec![NONE; nodes],
        }
    }

    #[inline]
    pub fn links(&self, set: u32) -> &[LinkId] {
        let set = set as usize;
        match set.checked_sub(self.singles.len()) {
            None => &self.singles[set..=set],
            Some(place) => {
                let (first, end) = self.spans[place];
                &self.links[first as usize..end as usize]
            }
        }
    }

    pub fn number(&mut self, node: u32, links: &[LinkId]) -> u32 {
        if let [one] = links {
            return one.0;
        }
        let last = self.last[node as usize];
        if last != NONE && self.links(last) == links {
            return last;
        }
        let set = match self.by_links.get(links) {
            Some(&set) => set,
            None => {
                let first = self.links.len() as u32;
                self.links.extend_from_slice(links);
                let set = (self.singles.len() + self.spans.len()) as u32;
                self.spans.push((first, self.links.len() as u32));
                self.by_links.insert(links.into(), set);
                set
            }
        };
        self.last[node as usize] = set;
        set
    }
}
