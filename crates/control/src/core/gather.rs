//! Collective calls: each rank contributes a part and receives all ranks' parts.
//!
//! Calls are matched by sequence number: each rank's n-th call is the same collective. Each part
//! carries its operation, so mismatched calls are detected. A call whose wait ended early keeps its
//! number, and the same call repeated continues it.

use super::call::{CallPart, Payload, PendingCall};
use super::{Core, PeerStatus};
use crate::message::Message;
use crate::wire::{MAX_PAYLOAD, Malformed};
use crate::{Error, Member, Operation, Rank, Result};

/// Stored part bytes that a peer may send ahead of this rank's own calls.
const MAX_AHEAD: usize = 4 * MAX_PAYLOAD;

impl Core {
    /// Begins a collective call, or continues the same call whose wait ended early; returns its sequence
    /// number. A different call abandons the unfinished one.
    pub(crate) fn gather(
        &mut self,
        generation: u32,
        operation: Operation,
        payload: Payload,
    ) -> Result<u64> {
        self.usable(generation)?;
        let group = self.groups.entry(generation).or_default();
        let members = group.members.clone();
        if let Payload::Each(bytes) = payload
            && bytes.len() != members.len()
        {
            let (given, world_size) = (bytes.len(), members.len());
            return Err(Error::WrongCount { operation: operation.name(), given, world_size });
        }
        let digest = payload.digest();
        let mut unfinished = group.calls.iter_mut().filter(|(_, call)| !call.waiting);
        if let Some((sequence, call)) = unfinished.find(|(_, call)| call.operation == operation) {
            if call.digest != digest {
                return Err(Error::PayloadMismatch { operation });
            }
            call.waiting = true;
            return Ok(*sequence);
        }
        group.calls.retain(|sequence, call| {
            if !call.waiting {
                group.gathers.remove(sequence);
            }
            call.waiting
        });
        let sequence = group.next_sequence;
        group.next_sequence += 1;
        group.calls.insert(sequence, PendingCall { operation, digest, waiting: true });
        let parts = group.gathers.entry(sequence).or_default();
        for (sender, part) in parts.iter() {
            if let Some(peer) = self.peers.get_mut(sender) {
                peer.ahead = peer.ahead.saturating_sub(part.stored_bytes());
            }
        }
        let own = group.rank_of(self.me).unwrap_or_default();
        let part = CallPart { operation, payload: payload.of(own).to_vec() };
        group.gathers.entry(sequence).or_default().insert(self.me, part);
        let message = |payload: &[u8]| Message::Gather {
            generation,
            sequence,
            operation,
            payload: payload.to_vec(),
        };
        match payload {
            Payload::Same(bytes) => self.broadcast(&message(bytes)),
            Payload::Each(_) => {
                for member in members.iter().filter(|m| m.rank != own) {
                    if self.status(member.original_rank) == PeerStatus::Alive {
                        self.send(member.original_rank, &message(payload.of(member.rank)));
                    }
                }
            }
        }
        Ok(sequence)
    }

    /// Call outcome, once it has ended.
    pub(crate) fn gather_done(
        &mut self,
        generation: u32,
        sequence: u64,
    ) -> Option<Result<Vec<Vec<u8>>>> {
        let outcome = self.gather_outcome(generation, sequence)?;
        let group = self.groups.get_mut(&generation)?;
        group.calls.remove(&sequence);
        let mut parts = group.gathers.remove(&sequence).unwrap_or_default();
        let in_order = group.members.iter().filter_map(|m| parts.remove(&m.original_rank));
        Some(outcome.map(|()| in_order.map(|part| part.payload).collect()))
    }

    fn gather_outcome(&self, generation: u32, sequence: u64) -> Option<Result<()>> {
        let missing = self.gather_missing(generation, sequence);
        let group = self.groups.get(&generation)?;
        let ours = group.calls.get(&sequence)?.operation;
        let parts = group.gathers.get(&sequence)?;
        let other = group.members.iter().find_map(|member| {
            let part = parts.get(&member.original_rank).filter(|part| part.operation != ours)?;
            Some((member.rank, part.operation))
        });
        if let Some((peer, theirs)) = other {
            return Some(Err(Error::CallMismatch { peer, theirs, ours }));
        }
        if missing.is_empty() {
            return Some(Ok(()));
        }
        let left = missing.iter().find(|rank| {
            let member = group.members.get(rank.index());
            member.is_some_and(|m| self.status(m.original_rank) == PeerStatus::Left)
        });
        match (&group.poison, left) {
            (Some(poison), _) => Some(Err(Error::Poisoned(poison.clone()))),
            (None, Some(rank)) => Some(Err(Error::Left { rank: *rank, operation: ours.name() })),
            (None, None) if self.closed || self.leaving => Some(Err(Error::Closed)),
            (None, None) => None,
        }
    }

    /// Ranks in that generation whose part has not arrived.
    pub(crate) fn gather_missing(&self, generation: u32, sequence: u64) -> Vec<Rank> {
        let Some(group) = self.groups.get(&generation) else { return Vec::new() };
        let parts = group.gathers.get(&sequence);
        let here = |m: &Member| parts.is_some_and(|parts| parts.contains_key(&m.original_rank));
        group.members.iter().filter(|m| !here(m)).map(|m| m.rank).collect()
    }

    /// Marks a call as no longer waited for; it stays unfinished.
    pub(crate) fn gather_pause(&mut self, generation: u32, sequence: u64) {
        let group = self.groups.get_mut(&generation);
        if let Some(call) = group.and_then(|group| group.calls.get_mut(&sequence)) {
            call.waiting = false;
        }
    }

    pub(super) fn part_received(
        &mut self,
        from: Rank,
        generation: u32,
        sequence: u64,
        part: CallPart,
    ) -> std::result::Result<(), Malformed> {
        self.known_generation(generation)?;
        if generation < self.newest {
            return Ok(());
        }
        let group = self.groups.entry(generation).or_default();
        if sequence < group.next_sequence && !group.calls.contains_key(&sequence) {
            return Ok(());
        }
        if sequence >= group.next_sequence
            && let Some(peer) = self.peers.get_mut(&from)
        {
            peer.ahead += part.stored_bytes();
            if peer.ahead > MAX_AHEAD {
                return Err(Malformed("it is too far ahead of this rank's own calls"));
            }
        }
        if group.gathers.entry(sequence).or_default().insert(from, part).is_some() {
            return Err(Malformed("it sent the same part of a collective call twice"));
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "gather_tests.rs"]
mod tests;
