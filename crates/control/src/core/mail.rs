//! Point-to-point messages: a queue for each peer and channel, in the order of sending.
//!
//! A sender counts what its peer has not received and refuses more beyond [`MAX_QUEUED`], so a
//! program that sends faster than its peer receives gets an error. A peer that ignores the limit
//! loses its connection.

use super::{Core, PeerStatus};
use crate::message::Message;
use crate::wire::{MAX_PAYLOAD, Malformed};
use crate::{Error, Rank, Result};
use std::collections::{BTreeMap, VecDeque};

/// How many bytes of messages to one peer may wait to be received there, [`weight`] for each.
pub(crate) const MAX_QUEUED: usize = 2 * MAX_PAYLOAD;
/// How many received bytes may be unreported to their sender: a fraction, so that the largest message
/// always fits once everything before it was received.
const MAX_UNREPORTED: usize = MAX_PAYLOAD / 4;
const RECEIVE: &str = "receive";

/// The point-to-point messages of one generation. Ranks are original ones.
#[derive(Default)]
pub(super) struct Mail {
    /// Messages not received yet, by sender and channel; no queue is empty.
    queues: BTreeMap<(Rank, u32), VecDeque<Vec<u8>>>,
    /// Bytes sent to each peer that it has not reported as received.
    outstanding: BTreeMap<Rank, usize>,
    /// Bytes received from each peer that were not reported to it.
    unreported: BTreeMap<Rank, usize>,
}

impl Mail {
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

impl Mail {
    /// The senders of the messages that wait, with what each costs.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (Rank, usize)> {
        let queues = self.queues.iter();
        queues.flat_map(|((from, _), queue)| queue.iter().map(|each| (*from, weight(each))))
    }
}

/// What a queued message costs to store.
fn weight(payload: &[u8]) -> usize {
    payload.len() + 256
}

impl Core {
    /// Sends a message to a rank of that generation. It never waits.
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
        let outstanding = group.mail.outstanding.entry(peer).or_default();
        let queued = *outstanding + weight(payload);
        if queued > MAX_QUEUED {
            return Err(Error::Backlog { peer: to, queued: *outstanding, limit: MAX_QUEUED });
        }
        *outstanding = queued;
        if peer == self.me {
            group.mail.push(peer, channel, payload.to_vec());
        } else {
            let payload = payload.to_vec();
            self.send(peer, &Message::Mail { generation, channel, payload });
        }
        Ok(())
    }

    /// The next message of a rank on a channel, if there is one, or why there will be none.
    pub(crate) fn take(
        &mut self,
        generation: u32,
        from: Rank,
        channel: u32,
    ) -> Result<Option<Vec<u8>>> {
        self.usable(generation)?;
        let peer = self.original(generation, from)?;
        let Some(group) = self.groups.get_mut(&generation) else { return Err(Error::Superseded) };
        let Some(payload) = group.mail.pop(peer, channel) else {
            if self.status(peer) != PeerStatus::Alive {
                return Err(Error::Left { rank: from, operation: RECEIVE });
            }
            return Ok(None);
        };
        let bytes = weight(&payload);
        if peer == self.me {
            let outstanding = group.mail.outstanding.entry(peer).or_default();
            *outstanding = outstanding.saturating_sub(bytes);
            return Ok(Some(payload));
        }
        let unreported = group.mail.unreported.entry(peer).or_default();
        *unreported += bytes;
        let report = if *unreported >= MAX_UNREPORTED { std::mem::take(unreported) } else { 0 };
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.queued = peer.queued.saturating_sub(bytes);
        }
        if report > 0 && self.status(peer) == PeerStatus::Alive {
            self.send(peer, &Message::Taken { generation, bytes: report as u64 });
        }
        Ok(Some(payload))
    }

    pub(super) fn mailed(
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
            peer.queued += weight(&payload);
            if peer.queued > MAX_QUEUED {
                return Err(Malformed("more messages than may wait to be received"));
            }
        }
        self.groups.entry(generation).or_default().mail.push(from, channel, payload);
        Ok(())
    }

    pub(super) fn taken(
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
        let outstanding = group.mail.outstanding.entry(from).or_default();
        let left = usize::try_from(bytes).ok().and_then(|bytes| outstanding.checked_sub(bytes));
        *outstanding = left.ok_or(Malformed("it received more messages than were sent to it"))?;
        Ok(())
    }

    /// The original rank of a rank of that generation.
    fn original(&self, generation: u32, rank: Rank) -> Result<Rank> {
        let members = self.groups.get(&generation).map(|group| &*group.members).unwrap_or_default();
        let member = members.get(rank.index()).map(|member| member.original_rank);
        member.ok_or(Error::NoSuchRank { rank, world_size: members.len() as u32 })
    }
}

#[cfg(test)]
#[path = "mail_tests.rs"]
mod tests;
