//! Protocol on a pair's control connection, without socket or clock: exchanges, poison, leave.

use super::settings::{CONNECTOR, LISTENER};
use crate::core::{PeerLeftCallback, PoisonCallback};
use crate::message::Message;
use crate::wire::Malformed;
use crate::{Error, Operation, PeerStatus, Poison, Rank, Result};
use std::collections::VecDeque;

/// One end's protocol state.
pub(crate) struct PairProtocol {
    rank: Rank,
    /// Unfinished exchange: sequence number and operation.
    unfinished: Option<(u64, Operation)>,
    /// Finished exchange count.
    finished: u64,
    /// Parts received from the peer: sequence number, operation, payload.
    parts: VecDeque<(u64, Operation, Vec<u8>)>,
    pub poison: Option<Poison>,
    pub on_poison: Vec<PoisonCallback>,
    pub on_left: Vec<PeerLeftCallback>,
    pub peer: PeerStatus,
    /// True once the listener has confirmed the pair.
    pub confirmed: bool,
}

/// Callbacks to run once the state is unlocked.
#[derive(Default)]
pub(crate) struct PendingCallbacks {
    pub poisoned: Option<(Vec<PoisonCallback>, Poison)>,
    pub left: Vec<PeerLeftCallback>,
}

impl PairProtocol {
    pub fn new(rank: Rank) -> PairProtocol {
        PairProtocol {
            rank,
            unfinished: None,
            finished: 0,
            parts: VecDeque::new(),
            poison: None,
            on_poison: Vec::new(),
            on_left: Vec::new(),
            peer: PeerStatus::Alive,
            confirmed: false,
        }
    }

    /// The other end's rank.
    pub fn peer_rank(&self) -> Rank {
        if self.rank == LISTENER { CONNECTOR } else { LISTENER }
    }

    /// Operation in the unfinished exchange, if any.
    pub fn unfinished(&self) -> Option<Operation> {
        self.unfinished.map(|(_, operation)| operation)
    }

    /// Begins an exchange; returns the message, or `None` if the same exchange is unfinished.
    pub fn begin(&mut self, operation: Operation, payload: &[u8]) -> Result<Option<Message>> {
        match self.unfinished() {
            Some(unfinished) if unfinished == operation => return Ok(None),
            Some(unfinished) => {
                return Err(Error::CallMismatch {
                    peer: self.rank,
                    theirs: unfinished,
                    ours: operation,
                });
            }
            None => {}
        }
        let sequence = self.finished;
        self.unfinished = Some((sequence, operation));
        let payload = payload.to_vec();
        Ok(Some(Message::Gather { generation: 0, sequence, operation, payload }))
    }

    /// Peer's part in the next exchange, once received.
    pub fn next_part(&self) -> Option<(Operation, &[u8])> {
        self.parts.front().map(|(_, operation, payload)| (*operation, payload.as_slice()))
    }

    /// Finishes the unfinished exchange, once the peer's part is received.
    pub fn finish(&mut self) -> Result<Option<Vec<u8>>> {
        let Some((sequence, ours)) = self.unfinished else { return Ok(None) };
        if self.parts.front().is_none_or(|(number, ..)| *number != sequence) {
            return Ok(None);
        }
        let Some((_, theirs, payload)) = self.parts.pop_front() else { return Ok(None) };
        (self.unfinished, self.finished) = (None, sequence + 1);
        if theirs != ours {
            return Err(Error::CallMismatch { peer: self.peer_rank(), theirs, ours });
        }
        Ok(Some(payload))
    }

    /// Handles a message from the peer.
    ///
    /// # Errors
    /// The violated rule.
    pub fn receive(
        &mut self,
        message: Message,
        callbacks: &mut PendingCallbacks,
    ) -> std::result::Result<(), Malformed> {
        match message {
            Message::Gather { sequence, operation, payload, .. } => {
                // The peer is at most one exchange ahead, since it needs this end's part to finish.
                let next = self.parts.back().map_or(self.finished, |(number, ..)| number + 1);
                let limit = self.unfinished.map_or(self.finished, |(number, _)| number + 1);
                if sequence != next || sequence > limit {
                    return Err(Malformed("an exchange out of order"));
                }
                self.parts.push_back((sequence, operation, payload));
            }
            // The listener's first heartbeat confirms the pair.
            Message::Heartbeat => self.confirmed |= self.rank == CONNECTOR,
            Message::Poison { poison, .. } => {
                if self.poison.is_none() {
                    self.poisoned(poison, callbacks);
                }
            }
            Message::Leave => {
                self.peer = PeerStatus::Left;
                log::debug!("{} of a pair has left", self.peer_rank());
                callbacks.left.append(&mut self.on_left);
            }
            _ => return Err(Malformed("a message that is not part of the pair protocol")),
        }
        Ok(())
    }

    /// Sets the poison and takes the callbacks.
    pub fn poisoned(&mut self, poison: Poison, callbacks: &mut PendingCallbacks) {
        log::info!("a pair is poisoned: {poison}");
        self.poison = Some(poison.clone());
        callbacks.poisoned = Some((std::mem::take(&mut self.on_poison), poison));
    }
}
