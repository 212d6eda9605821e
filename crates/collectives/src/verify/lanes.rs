//! Lanes: posted and counted writes.

use super::happens_before::Clock;
use std::collections::HashMap;

/// One rank's lane at another.
#[derive(Default)]
pub(super) struct Lane {
    /// Posted and uncounted writes, with the sender's clock.
    pending: Vec<(u32, Clock)>,
    counted: u32,
    waited: u32,
}

impl Lane {
    pub(super) fn post(&mut self, write: u32, clock: Clock) {
        self.pending.push((write, clock));
    }

    /// Posted write count.
    pub(super) fn posted(&self) -> u32 {
        self.counted + self.pending.len() as u32
    }

    /// Number of writes counted by waits.
    pub(super) fn counted(&self) -> u32 {
        self.counted
    }

    /// Index of the last wait that counted a write.
    pub(super) fn waited(&self) -> Option<u32> {
        (self.counted > 0).then_some(self.waited)
    }

    /// First write after the first `count`; it is pending.
    pub(super) fn write(&self, count: u32) -> u32 {
        self.pending[(count - self.counted) as usize].0
    }

    /// Counts all pending writes for the wait with this index.
    pub(super) fn count(&mut self, wait: u32) -> Vec<(u32, Clock)> {
        let pending = std::mem::take(&mut self.pending);
        self.counted += pending.len() as u32;
        self.waited = wait;
        pending
    }
}

/// All used lanes.
#[derive(Default)]
pub(super) struct Lanes(HashMap<(u32, u32, u32), Lane>);

impl Lanes {
    /// Lane number `lane` from `from` at `to`.
    pub(super) fn get(&mut self, to: u32, from: u32, lane: u32) -> &mut Lane {
        self.0.entry((to, from, lane)).or_default()
    }
}
