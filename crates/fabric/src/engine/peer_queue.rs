//! Writes to one peer that wait for room in the link.

use crate::parts::Parts;
use crate::request::LaneTarget;
use crate::types::{RequestId, TrafficClass};
use std::collections::VecDeque;

/// Queued writes to one peer, by class.
#[derive(Default)]
pub(super) struct PeerQueue {
    pub(super) latency: VecDeque<QueuedWrite>,
    pub(super) bulk: VecDeque<QueuedWrite>,
    /// Listed in [`Engine`]'s `queued`.
    pub(super) listed: bool,
}

/// Write to one peer with parts that the link has not accepted.
pub(super) struct QueuedWrite {
    pub(super) request: RequestId,
    pub(super) destination: LaneTarget,
    pub(super) parts: Parts,
    pub(super) next: usize,
}

impl PeerQueue {
    pub(super) fn of(&mut self, class: TrafficClass) -> &mut VecDeque<QueuedWrite> {
        match class {
            TrafficClass::Latency => &mut self.latency,
            TrafficClass::Bulk => &mut self.bulk,
        }
    }

    /// True if a new write in this class has to queue.
    pub fn is_waiting(&self, class: TrafficClass) -> bool {
        match class {
            TrafficClass::Latency => !self.latency.is_empty(),
            TrafficClass::Bulk => !self.bulk.is_empty(),
        }
    }

    /// True if writes may be queued.
    #[inline(always)]
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    pub(super) fn is_empty(&self) -> bool {
        self.latency.is_empty() && self.bulk.is_empty()
    }
}
