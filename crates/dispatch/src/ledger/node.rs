//! Accelerator node in the ledger: slots, queries, load.

use super::policy::Load;

/// Slot without a query.
const FREE: u32 = u32::MAX;

/// State at a place in the node table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum NodeState {
    /// Without a node.
    Vacant,
    /// Takes queries.
    Ready,
    /// Answers queries, takes no more.
    Draining,
    /// Lost. Answers that the caller has not released keep their slots.
    Lost,
}

/// Place in the node table. No allocation after construction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Node {
    pub reuse: u32,
    pub state: NodeState,
    pub load: Load,
    pub quarantined: u32,
    /// Free slots; the last one is used next, while its memory is in the caches.
    free: Vec<u32>,
    /// Query in each slot.
    queries: Vec<u32>,
}

impl Node {
    /// Vacant place for a node with up to `slots` slots.
    pub fn vacant(slots: usize) -> Node {
        Node {
            reuse: 0,
            state: NodeState::Vacant,
            load: Load { in_flight: 0, latency: 0 },
            quarantined: 0,
            free: Vec::with_capacity(slots),
            queries: Vec::with_capacity(slots),
        }
    }

    /// Begins a node's life with `slots` free slots.
    pub fn join(&mut self, slots: u32) {
        self.state = NodeState::Ready;
        self.load = Load { in_flight: 0, latency: 0 };
        self.quarantined = 0;
        self.free.clear();
        self.free.extend((0..slots).rev());
        self.queries.clear();
        self.queries.resize(slots as usize, FREE);
    }

    /// Ends a node's life; the ids are stale afterwards.
    pub fn leave(&mut self) {
        self.state = NodeState::Vacant;
        self.reuse = self.reuse.wrapping_add(1);
    }

    /// Slot count.
    pub fn slots(&self) -> u32 {
        self.queries.len() as u32
    }

    /// True with a free slot.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Takes a free slot for a query.
    pub fn take(&mut self, query: u32) -> Option<u32> {
        let slot = self.free.pop()?;
        self.queries[slot as usize] = query;
        self.load.in_flight += 1;
        Some(slot)
    }

    /// Returns a slot.
    pub fn put_back(&mut self, slot: u32) {
        self.queries[slot as usize] = FREE;
        self.free.push(slot);
        self.load.in_flight -= 1;
    }

    /// The query in a slot.
    pub fn query_in(&self, slot: u32) -> Option<u32> {
        self.queries.get(slot as usize).copied().filter(|&query| query != FREE)
    }
}
