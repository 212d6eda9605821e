//! Point-to-point messages: a FIFO queue for each peer and channel, with flow control.
//!
//! A sender counts the bytes that its peer's program has not received and fails beyond [`MAX_QUEUED`]. The
//! receiver acknowledges received bytes in batches, and closes the connection of a sender beyond the limit.

use super::{Core, PeerStatus};
use crate::message::Message;
use crate::wire::{MAX_PAYLOAD, Malformed};
use crate::{Error, Rank, Result};
use std::collections::{BTreeMap, VecDeque};

/// Limit on the unreceived bytes of messages to one peer, [`stored_bytes`] for each.
pub(crate) const MAX_QUEUED: usize = 2 * MAX_PAYLOAD;
/// Received bytes that may be unacknowledged: a fraction of the limit, so that the largest message fits once
/// all earlier ones were received.
const MAX_UNACKNOWLEDGED: usize = MAX_PAYLOAD / 4;
const RECEIVE: &str = "receive";

/// Point-to-point messages of one generation. Ranks are original ones.
#[derive(Default)]
pub(super) struct MessageQueues {
    /// Unreceived messages, by sender and channel; no queue is empty.
    queues: BTreeMap<(Rank, u32), VecDeque<Vec<u8>>>,
    /// Bytes sent to each peer and not acknowledged.
    outstanding: BTreeMap<Rank, usize>,
    /// Bytes received from each peer and not acknowledged to it.
    unacknowledged: BTreeMap<Rank, usize>,
}

impl MessageQueues {
    fn push(&mut self, from: Rank, channel: u32, payload: Vec<u8>) {
        self.queues.entry((from, channel)).or_default().push_back(payload);
    }

    fn pop(&mut self, from: Rank, channel: u32) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(&(from, channel))?;
        let payload = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&(from, channel));
        }
        payload
    }
}

impl MessageQueues {
    /// Sender and stored bytes of each unreceived message.
    pub(super) fn unreceived(&self) -> impl Iterator<Item = (Rank, usize)> {
        let queues = self.queues.iter();
        queues.flat_map(|((from, _), queue)| queue.iter().map(|each| (*from, stored_bytes(each))))
    }
}

/// Bytes that a queued message counts for in limits: payload and 256 bytes of overhead.
fn stored_bytes(payload: &[u8]) -> usize {
    payload.len() + 256
}

impl Core {
    /// Queues a message to a rank of that generation, without waiting.
    pub(crate) fn post(
        &mut self,
        generation: u32,
        to: Rank,
        channel: u32,
        payload: &[u8],
    ) -> Result<()> {
        self.usable(generation)?;
        let peer = self.original(generation, to)?;
        if self.status(peer) != PeerStatus::Alive {
            return Err(Error::Left { rank: to, operation: "send" });
        }
        let Some(group) = self.groups.get_mut(&generation) else { return Err(Error::Superseded) };
        let outstanding = group.messages.outstanding.entry(peer).or_default();
        let queued = *outstanding + stored_bytes(payload);
        if queued > MAX_QUEUED {
            return Err(Error::Backlog { peer: to, queued: *outstanding, limit: MAX_QUEUED });
        }
        *outstanding = queued;
        if peer == self.me {
            group.messages.push(peer, channel, payload.to_vec());
        } else {
            let payload = payload.to_vec();
            self.send(peer, &Message::PointToPoint { generation, channel, payload });
        }
        Ok(())
    }

    /// Next message of a rank on a channel, if one is queued; an error if none can follow.
    pub(crate) fn take_message(
        &mut self,
        generation: u32,
        from: Rank,
        channel: u32,
    ) -> Result<Option<Vec<u8>>> {
        self.usable(generation)?;
        let peer = self.original(generation, from)?;
        let Some(group) = self.groups.get_mut(&generation) else { return Err(Error::Superseded) };
        let Some(payload) = group.messages.pop(peer, channel) else {
            if self.status(peer) != PeerStatus::Alive {
                return Err(Error::Left { rank: from, operation: RECEIVE });
            }
            return Ok(None);
        };
        let bytes = stored_bytes(&payload);
        if peer == self.me {
            let outstanding = group.messages.outstanding.entry(peer).or_default();
            *outstanding = outstanding.saturating_sub(bytes);
            return Ok(Some(payload));
        }
        let unacknowledged = group.messages.unacknowledged.entry(peer).or_default();
        *unacknowledged += bytes;
        let acknowledge =
            if *unacknowledged >= MAX_UNACKNOWLEDGED { std::mem::take(unacknowledged) } else { 0 };
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.queued = peer.queued.saturating_sub(bytes);
        }
        if acknowledge > 0 && self.status(peer) == PeerStatus::Alive {
            self.send(peer, &Message::Acknowledge { generation, bytes: acknowledge as u64 });
        }
        Ok(Some(payload))
    }

    pub(super) fn message_received(
        &mut self,
        from: Rank,
        generation: u32,
        channel: u32,
        payload: Vec<u8>,
    ) -> std::result::Result<(), Malformed> {
        self.known_generation(generation)?;
        if generation < self.newest {
            return Ok(());
        }
        if let Some(peer) = self.peers.get_mut(&from) {
            peer.queued += stored_bytes(&payload);
            if peer.queued > MAX_QUEUED {
                return Err(Malformed("unreceived messages beyond the limit"));
            }
        }
        self.groups.entry(generation).or_default().messages.push(from, channel, payload);
        Ok(())
    }

    pub(super) fn acknowledged(
        &mut self,
        from: Rank,
        generation: u32,
        bytes: u64,
    ) -> std::result::Result<(), Malformed> {
        self.known_generation(generation)?;
        if generation != self.newest {
            return Ok(());
        }
        let Some(group) = self.groups.get_mut(&generation) else { return Ok(()) };
        let outstanding = group.messages.outstanding.entry(from).or_default();
        let left = usize::try_from(bytes).ok().and_then(|bytes| outstanding.checked_sub(bytes));
        *outstanding = left.ok_or(Malformed("an acknowledgement of more bytes than were sent"))?;
        Ok(())
    }

    /// Original rank of a rank of that generation.
    fn original(&self, generation: u32, rank: Rank) -> Result<Rank> {
        let members = self.groups.get(&generation).map(|group| &*group.members).unwrap_or_default();
        let member = members.get(rank.index()).map(|member| member.original_rank);
        member.ok_or(Error::NoSuchRank { rank, world_size: members.len() as u32 })
    }
}

#[cfg(test)]
#[path = "point_to_point_tests.rs"]
mod tests;
