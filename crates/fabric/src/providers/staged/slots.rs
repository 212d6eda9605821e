//! Slot accounting at both ends, without bytes.
//!
//! Slots are a ring in each direction. The sender fills them in turn; parts arrive and are copied in any
//! order; the receiver frees them in turn, and reports each by one raise, so that one count says which
//! slots are free.

use std::ops::Range;

/// The sender's slot count at one peer.
#[derive(Clone, Copy, Debug)]
pub struct SentSlots {
    slots: u64,
    /// Turns taken.
    taken: u64,
    /// Turns that the peer has freed.
    freed: u64,
}

impl SentSlots {
    pub fn new(slots: u32) -> SentSlots {
        SentSlots { slots: slots.into(), taken: 0, freed: 0 }
    }

    /// Slots that are free.
    pub fn free_slots(&self) -> u64 {
        self.slots - (self.taken - self.freed)
    }

    /// The next turn, if the slot is free.
    pub fn next(&self) -> Option<u64> {
        (self.free_slots() > 0).then_some(self.taken)
    }

    /// Takes the next turn.
    pub fn take(&mut self) {
        debug_assert!(self.free_slots() > 0);
        self.taken += 1;
    }

    /// True if the peer has freed more than was counted.
    pub fn is_behind(&self, freed: u64) -> bool {
        freed != self.freed
    }

    /// Counts `freed` slots in all; returns the turns that are free now.
    ///
    /// # Errors
    /// The peer frees slots that were not filled.
    pub fn free(&mut self, freed: u64) -> Result<Range<u64>, String> {
        if freed < self.freed || freed > self.taken {
            return Err(format!("{freed} slots freed, {} were filled", self.taken));
        }
        let newly = self.freed..freed;
        self.freed = freed;
        Ok(newly)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    /// The sender may fill it.
    Free,
    /// Filled, being copied.
    Copying,
    Copied,
}

/// The receiver's slots for one peer.
#[derive(Clone, Debug)]
pub struct ArrivedSlots {
    /// State, and how often it was filled.
    slots: Vec<(SlotState, u64)>,
    /// Turns freed.
    freed: u64,
}

impl ArrivedSlots {
    pub fn new(slots: u32) -> ArrivedSlots {
        ArrivedSlots { slots: vec![(SlotState::Free, 0); slots as usize], freed: 0 }
    }

    /// True if the slot was raised more often than was counted.
    pub fn is_behind(&self, slot: usize, raised: u64) -> bool {
        self.slots[slot].1 != raised
    }

    /// Counts a slot whose lane has been raised `raised` times; returns the turn if it was filled since.
    ///
    /// # Errors
    /// The peer filled a slot that is not free, or one twice.
    pub fn arrive(&mut self, slot: usize, raised: u64) -> Result<Option<u64>, String> {
        let count = self.slots.len() as u64;
        let (state, times) = &mut self.slots[slot];
        if raised == *times {
            return Ok(None);
        }
        if raised != *times + 1 || *state != SlotState::Free {
            return Err(format!("slot {slot} was filled {raised} times: it was not free"));
        }
        let turn = *times * count + slot as u64;
        (*state, *times) = (SlotState::Copying, raised);
        Ok(Some(turn))
    }

    /// Records that a turn's bytes are copied: the slot is read no more.
    pub fn copied(&mut self, turn: u64) {
        let slot = (turn % self.slots.len() as u64) as usize;
        debug_assert_eq!(self.slots[slot].0, SlotState::Copying);
        self.slots[slot].0 = SlotState::Copied;
    }

    /// Frees copied slots in turn; returns how many.
    pub fn free(&mut self) -> u64 {
        let (begin, count) = (self.freed, self.slots.len() as u64);
        loop {
            let state = &mut self.slots[(self.freed % count) as usize].0;
            if *state != SlotState::Copied {
                return self.freed - begin;
            }
            *state = SlotState::Free;
            self.freed += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_slot_that_is_not_free_is_not_filled_again() {
        let mut arrived = ArrivedSlots::new(2);
        assert_eq!(arrived.arrive(1, 1), Ok(Some(1)));
        assert_eq!(arrived.arrive(1, 1), Ok(None));
        assert!(arrived.arrive(1, 2).is_err() && arrived.arrive(0, 2).is_err());
        arrived.copied(1);
        // The slot before it is not copied.
        assert_eq!(arrived.free(), 0);
        assert!(arrived.arrive(1, 2).is_err());
        assert_eq!(arrived.arrive(0, 1), Ok(Some(0)));
        arrived.copied(0);
        assert_eq!(arrived.free(), 2);
        assert_eq!(arrived.arrive(1, 2), Ok(Some(3)));
        let mut sent = SentSlots::new(2);
        sent.take();
        assert!(sent.free(2).is_err());
        assert_eq!(sent.free(1), Ok(0..1));
        assert!(sent.free(0).is_err());
    }

    proptest! {
        /// However fills, arrivals, copies and frees are ordered: no turn is filled while the slot is in
        /// use, each turn arrives once, and at the end all slots are free.
        #[test]
        fn no_slot_is_filled_before_it_was_freed_and_none_is_lost(
            slots in 1u32..7,
            steps in prop::collection::vec((0u32..4, any::<u32>()), 0..500),
        ) {
            let (mut sent, mut arrived) = (SentSlots::new(slots), ArrivedSlots::new(slots));
            let mut raised = vec![0u64; slots as usize];
            let (mut under_way, mut copying, mut freed) = (Vec::new(), Vec::new(), 0);
            let (mut filled, mut done) = (0, 0);
            let mut step = |which: u32, at: u32, fills: bool| -> Result<(), TestCaseError> {
                match which {
                    0 if fills => if let Some(turn) = sent.next() {
                        let busy = under_way.iter().chain(&copying);
                        prop_assert!(busy.clone().all(|&other: &u64| other % u64::from(slots) != turn % u64::from(slots)));
                        sent.take();
                        under_way.push(turn);
                        filled += 1;
                    },
                    1 if !under_way.is_empty() => {
                        let turn: u64 = under_way.swap_remove(at as usize % under_way.len());
                        let slot = (turn % u64::from(slots)) as usize;
                        raised[slot] += 1;
                        prop_assert_eq!(arrived.arrive(slot, raised[slot]), Ok(Some(turn)));
                        copying.push(turn);
                    }
                    2 if !copying.is_empty() => {
                        arrived.copied(copying.swap_remove(at as usize % copying.len()));
                        done += 1;
                        freed += arrived.free();
                    }
                    3 => {
                        sent.free(freed).unwrap();
                    }
                    _ => {}
                }
                Ok(())
            };
            for (which, at) in steps {
                step(which, at, true)?;
            }
            for _ in 0..2 * slots {
                for which in 1..4 {
                    step(which, 0, false)?;
                }
            }
            prop_assert_eq!(filled, done);
            prop_assert_eq!(sent.free_slots(), u64::from(slots));
            prop_assert!(arrived.slots.iter().all(|(state, _)| *state == SlotState::Free));
        }
    }
}
