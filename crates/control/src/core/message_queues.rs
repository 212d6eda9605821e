//! Point-to-point message queues for one generation, with limits.

use crate::Rank;
use crate::wire::MAX_PAYLOAD;
use std::collections::{BTreeMap, VecDeque};

/// Limit on unreceived message bytes to one peer, [`stored_bytes`] for each.
pub(crate) const MAX_QUEUED: usize = 2 * MAX_PAYLOAD;

/// Received bytes that may be unacknowledged: a fraction of the limit, so that the largest message fits once
/// all earlier ones were received.
pub(super) const MAX_UNACKNOWLEDGED: usize = MAX_PAYLOAD / 4;

/// Point-to-point messages in one generation. Ranks are original ones.
#[derive(Default)]
pub(super) struct MessageQueues {
    /// Unreceived messages, by sender and channel; no queue is empty.
    pub(super) queues: BTreeMap<(Rank, u32), VecDeque<Vec<u8>>>,
    /// Bytes sent to each peer and not acknowledged.
    pub(super) outstanding: BTreeMap<Rank, usize>,
    /// Bytes received from each peer and not acknowledged to it.
    pub(super) unacknowledged: BTreeMap<Rank, usize>,
}

impl MessageQueues {
    pub(super) fn push(&mut self, from: Rank, channel: u32, payload: Vec<u8>) {
        self.queues.entry((from, channel)).or_default().push_back(payload);
    }

    pub(super) fn pop(&mut self, from: Rank, channel: u32) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(&(from, channel))?;
        let payload = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&(from, channel));
        }
        payload
    }
}

impl MessageQueues {
    /// Sender and stored bytes for each unreceived message.
    pub(super) fn unreceived(&self) -> impl Iterator<Item = (Rank, usize)> {
        let queues = self.queues.iter();
        queues.flat_map(|((from, _), queue)| queue.iter().map(|each| (*from, stored_bytes(each))))
    }
}

/// Bytes that a queued message counts against limits: payload plus 256 bytes overhead.
pub(super) fn stored_bytes(payload: &[u8]) -> usize {
    payload.len() + 256
}
