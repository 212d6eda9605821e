//! Query deadlines: a list for those that were added in order, and a binary min-heap with positions for others.
//!
//! A query that is added with the latest deadline in the list, as with equal time limits, is added and removed in O(1),
//! any other one in O(log n).

use super::queue::Queue;
use weft_fabric::Time;

/// Heap position for a query without a deadline.
const NONE: u32 = u32::MAX;

/// Deadlines by query index. No allocation after construction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Deadlines {
    /// Queries whose deadlines rise from the first to the last.
    rising: Queue,
    /// Deadline by query, for queries in `rising`.
    times: Box<[Time]>,
    heap: Vec<(Time, u32)>,
    /// Position in the heap, by query.
    positions: Box<[u32]>,
}

impl Deadlines {
    /// No deadlines, for queries with index 0 to `queries - 1`.
    pub fn new(queries: usize) -> Deadlines {
        let positions = vec![NONE; queries].into_boxed_slice();
        let times = vec![Time(0); queries].into_boxed_slice();
        let (rising, heap) = (Queue::new(queries), Vec::with_capacity(queries));
        Deadlines { rising, times, heap, positions }
    }

    /// The earliest deadline and its query.
    #[inline]
    pub fn first(&self) -> Option<(Time, u32)> {
        let rising = self.rising.first().map(|query| (self.times[query as usize], query));
        match self.heap.first() {
            None => rising,
            Some(first) => rising.into_iter().chain([*first]).min(),
        }
    }

    /// Adds a query that has none.
    pub fn insert(&mut self, at: Time, query: u32) {
        debug_assert!(self.positions[query as usize] == NONE && !self.rising.has(query));
        if self.rising.last().is_none_or(|last| self.times[last as usize] <= at) {
            self.times[query as usize] = at;
            self.rising.push_last(query);
            return;
        }
        self.heap.push((at, query));
        self.rise(self.heap.len() - 1);
    }

    /// Removes a query's deadline, if it has one.
    #[inline]
    pub fn remove(&mut self, query: u32) {
        if self.rising.has(query) {
            self.rising.remove(query);
        } else {
            self.remove_from_heap(query);
        }
    }

    fn remove_from_heap(&mut self, query: u32) {
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
        /// Insertions and removals in any order: the first deadline is the same as in a sorted set, and its query has
        /// it.
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
                let first = deadlines.first();
                prop_assert_eq!(first.map(|(at, _)| at), model.first().map(|(at, _)| *at));
                prop_assert!(first.is_none_or(|(at, query)| of[query as usize] == Some(at)));
            }
        }
    }
}
