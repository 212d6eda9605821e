//! Lanes: which writes were posted on them, and which a wait has counted.

use super::order::Clock;
use std::collections::HashMap;

/// The lane of one rank at another.
#[derive(Default)]
pub(super) struct Lane {
    /// Writes posted and not counted yet, with what their sender knew.
    pending: Vec<(u32, Clock)>,
    counted: u32,
    waited: u32,
}

impl Lane {
    pub(super) fn post(&mut self, write: u32, clock: Clock) {
        self.pending.push((write, clock));
    }

    /// The number of writes posted.
    pub(super) fn posted(&self) -> u32 {
        self.counted + self.pending.len() as u32
    }

    /// The number of writes that waits have counted.
    pub(super) fn counted(&self) -> u32 {
        self.counted
    }

    /// The last wait that counted any, by its index.
    pub(super) fn waited(&self) -> Option<u32> {
        (self.counted > 0).then_some(self.waited)
    }

    /// The write after the first `count`, which is pending.
    pub(super) fn write(&self, count: u32) -> u32 {
        self.pending[(count - self.counted) as usize].0
    }

    /// Counts all that is pending, for the wait of this index.
    pub(super) fn count(&mut self, wait: u32) -> Vec<(u32, Clock)> {
        let pending = std::mem::take(&mut self.pending);
        self.counted += pending.len() as u32;
        self.waited = wait;
        pending
    }
}

/// All lanes that were ever used.
#[derive(Default)]
pub(super) struct Lanes(HashMap<(u32, u32, u32), Lane>);

impl Lanes {
    /// The lane number `lane` of `from` at `to`.
    pub(super) fn get(&mut self, to: u32, from: u32, lane: u32) -> &mut Lane {
        self.0.entry((to, from, lane)).or_default()
    }
}
