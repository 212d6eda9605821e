//! Deadlines of queries: a binary min-heap with positions, so that any entry is removed in O(log n).

use weft_fabric::Time;

/// Position of a query without a deadline in the heap.
const NONE: u32 = u32::MAX;

/// Deadlines by index of their query. Without allocation after construction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Deadlines {
    heap: Vec<(Time, u32)>,
    /// Position in the heap, by query.
    positions: Box<[u32]>,
}

impl Deadlines {
    /// Empty heap for queries of index 0 to `queries - 1`.
    pub fn new(queries: usize) -> Deadlines {
        let positions = vec![NONE; queries].into_boxed_slice();
        Deadlines { heap: Vec::with_capacity(queries), positions }
    }

    /// The earliest deadline and its query.
    pub fn first(&self) -> Option<(Time, u32)> {
        self.heap.first().copied()
    }

    /// Adds a query that has none.
    pub fn insert(&mut self, at: Time, query: u32) {
        debug_assert_eq!(self.positions[query as usize], NONE);
        self.heap.push((at, query));
        self.rise(self.heap.len() - 1);
    }

    /// Removes the deadline of a query, if it has one.
    pub fn remove(&mut self, query: u32) {
        let position = std::mem::replace(&mut self.positions[query as usize], NONE);
        if position == NONE {
            return;
        }
        let position = position as usize;
        let Some(last) = self.heap.pop() else { return };
        if position == self.heap.len() {
            return;
        }
        self.heap[position] = last;
        self.rise(position);
        self.sink(self.positions[last.1 as usize] as usize);
    }

    fn rise(&mut self, mut position: usize) {
        let entry = self.heap[position];
        while position > 0 {
            let parent = (position - 1) / 2;
            if self.heap[parent] <= entry {
                break;
            }
            self.place(position, self.heap[parent]);
            position = parent;
        }
        self.place(position, entry);
    }

    fn sink(&mut self, mut position: usize) {
        let entry = self.heap[position];
        loop {
            let left = 2 * position + 1;
            let Some(&first) = self.heap.get(left) else { break };
            let (child, least) = match self.heap.get(left + 1) {
                Some(&second) if second < first => (left + 1, second),
                _ => (left, first),
            };
            if entry <= least {
                break;
            }
            self.place(position, least);
            position = child;
        }
        self.place(position, entry);
    }

    fn place(&mut self, position: usize, entry: (Time, u32)) {
        self.heap[position] = entry;
        self.positions[entry.1 as usize] = position as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// Insertions and removals in any order: the first entry is that of a sorted set.
        #[test]
        fn the_first_deadline_is_the_earliest(steps in prop::collection::vec((0u32..12, 0u64..9), 0..200)) {
            let (mut deadlines, mut model) = (Deadlines::new(12), BTreeSet::new());
            let mut of = [None; 12];
            for (query, at) in steps {
                match of[query as usize].take() {
                    Some(at) => {
                        deadlines.remove(query);
                        model.remove(&(at, query));
                    }
                    None => {
                        deadlines.insert(Time(at), query);
                        model.insert((Time(at), query));
                        of[query as usize] = Some(Time(at));
                    }
                }
                prop_assert_eq!(deadlines.first(), model.first().copied());
            }
        }
    }
}
