//! Chains in flight on a queue pair: a ring buffer, oldest first.

/// Purpose of a chain in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainUse {
    /// Part that the engine posted.
    Part { token: u64, is_bulk: bool },
    /// Link control message.
    Control,
}

/// Work request chain in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    pub chain_use: ChainUse,
    /// Work requests.
    pub length: u32,
}

/// Chains in flight. The capacity equals the send queue's, so it never grows.
pub struct Chains {
    /// A power of two.
    slots: Box<[Chain]>,
    /// Chains added and taken since it was last empty, modulo 2^32.
    added: u32,
    taken: u32,
}

impl Chains {
    /// Empty ring for at least `capacity` chains.
    pub fn new(capacity: u32) -> Chains {
        let unused = Chain { chain_use: ChainUse::Control, length: 0 };
        let slots = vec![unused; (capacity as usize).next_power_of_two()].into();
        Chains { slots, added: 0, taken: 0 }
    }

    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.added == self.taken
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> usize {
        index as usize & (self.slots.len() - 1)
    }

    /// Adds a chain, for which there is room.
    #[inline(always)]
    pub fn push(&mut self, chain: Chain) {
        debug_assert!((self.added.wrapping_sub(self.taken) as usize) < self.slots.len());
        let slot = self.slot(self.added);
        self.slots[slot] = chain;
        self.added = self.added.wrapping_add(1);
    }

    /// The oldest chain.
    pub fn oldest(&self) -> Option<Chain> {
        (!self.is_empty()).then(|| self.slots[self.slot(self.taken)])
    }

    /// Takes the oldest chain.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Chain> {
        if self.is_empty() {
            return None;
        }
        let chain = self.slots[self.slot(self.taken)];
        self.taken = self.taken.wrapping_add(1);
        if self.is_empty() {
            // Back to the first slot, which is in the cache.
            self.clear();
        }
        Some(chain)
    }

    pub fn clear(&mut self) {
        (self.added, self.taken) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        #[test]
        fn chains_leave_in_the_order_of_a_queue_also_behind_the_last_number(
            capacity in 1u32..9,
            before in any::<u32>(),
            steps in prop::collection::vec(prop::option::weighted(0.6, 1u32..33), 0..60),
        ) {
            let mut chains = Chains::new(capacity);
            (chains.added, chains.taken) = (before, before);
            let mut queue = VecDeque::new();
            for (token, step) in (0..).zip(steps) {
                match step {
                    Some(length) if queue.len() < capacity as usize => {
                        let chain_use = ChainUse::Part { token, is_bulk: length > 9 };
                        chains.push(Chain { chain_use, length });
                        queue.push_back(Chain { chain_use, length });
                    }
                    _ => {
                        prop_assert_eq!(chains.oldest(), queue.front().copied());
                        prop_assert_eq!(chains.pop(), queue.pop_front());
                    }
                }
                prop_assert_eq!(chains.is_empty(), queue.is_empty());
            }
        }
    }
}
