//! Query queue: a doubly linked list over a link table; any entry is removed in O(1).

/// List end, and the link in an entry outside the list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Link {
    before: u32,
    behind: u32,
    listed: bool,
}

/// Entries by index, each at most once. Without allocation after construction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Queue {
    links: Box<[Link]>,
    first: u32,
    last: u32,
    length: u32,
}

impl Queue {
    /// Empty queue for indexes 0 to `entries - 1`.
    pub fn new(entries: usize) -> Queue {
        let free = Link { before: NONE, behind: NONE, listed: false };
        Queue { links: vec![free; entries].into(), first: NONE, last: NONE, length: 0 }
    }

    /// Entry count.
    pub fn len(&self) -> u32 {
        self.length
    }

    /// The first entry.
    pub fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// The last entry.
    pub fn last(&self) -> Option<u32> {
        (self.last != NONE).then_some(self.last)
    }

    /// True for an entry in the queue.
    pub fn has(&self, entry: u32) -> bool {
        self.links[entry as usize].listed
    }

    /// Adds an entry at the end.
    pub fn push_last(&mut self, entry: u32) {
        let before = self.last;
        self.links[entry as usize] = Link { before, behind: NONE, listed: true };
        match before {
            NONE => self.first = entry,
            before => self.links[before as usize].behind = entry,
        }
        self.last = entry;
        self.length += 1;
    }

    /// Adds an entry at the front.
    pub fn push_first(&mut self, entry: u32) {
        let behind = self.first;
        self.links[entry as usize] = Link { before: NONE, behind, listed: true };
        match behind {
            NONE => self.last = entry,
            behind => self.links[behind as usize].before = entry,
        }
        self.first = entry;
        self.length += 1;
    }

    /// Removes the first entry.
    pub fn pop_first(&mut self) -> Option<u32> {
        let first = self.first()?;
        self.remove(first);
        Some(first)
    }

    /// Removes an entry, if the queue holds it.
    pub fn remove(&mut self, entry: u32) {
        let Link { before, behind, listed } = self.links[entry as usize];
        if !listed {
            return;
        }
        match before {
            NONE => self.first = behind,
            before => self.links[before as usize].behind = behind,
        }
        match behind {
            NONE => self.last = before,
            behind => self.links[behind as usize].before = before,
        }
        self.links[entry as usize].listed = false;
        self.length -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        #[test]
        fn it_behaves_as_a_deque_with_removal(steps in prop::collection::vec((0u32..4, 0u32..8), 0..200)) {
            let (mut queue, mut model) = (Queue::new(8), VecDeque::new());
            for (step, entry) in steps {
                let listed = model.contains(&entry);
                                match step {
                    0 if !listed => { queue.push_last(entry); model.push_back(entry); }
                    1 if !listed => { queue.push_first(entry); model.push_front(entry); }
                    2 => { queue.remove(entry); model.retain(|&other| other != entry); }
                    _ => prop_assert_eq!(queue.pop_first(), model.pop_front()),
                }
                prop_assert_eq!((queue.len(), queue.first()), (model.len() as u32, model.front().copied()));
            }
        }
    }
}
