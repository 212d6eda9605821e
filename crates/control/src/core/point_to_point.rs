//! Point-to-point messages: a FIFO queue for each peer and channel, with flow control.
//!
//! A sender counts the bytes that its peer's program has not received and fails beyond [`MAX_QUEUED`]. The
//! receiver acknowledges received bytes in batches, and closes a sender's connection beyond the limit.

use super::message_queues::{MAX_QUEUED, MAX_UNACKNOWLEDGED, stored_bytes};
use super::{Core, PeerStatus};
use crate::message::Message;
use crate::wire::Malformed;
use crate::{Error, Rank, Result};

const RECEIVE: &str = "receive";

impl Core {
    /// Queues a message to a rank in that generation, without waiting.
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

    /// Next message from a rank on a channel, if one is queued; an error if none can follow.
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

    /// Original rank for a rank in that generation.
    fn original(&self, generation: u32, rank: Rank) -> Result<Rank> {
        let members = self.groups.get(&generation).map(|group| &*group.members).unwrap_or_default();
        let member = members.get(rank.index()).map(|member| member.original_rank);
        member.ok_or(Error::NoSuchRank { rank, world_size: members.len() as u32 })
    }
}

#[cfg(test)]
#[path = "point_to_point_tests.rs"]
mod tests;
