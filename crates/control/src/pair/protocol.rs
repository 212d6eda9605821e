//! Protocol of a pair's control connection, without a socket and without a clock: exchanges, poison, goodbye.

use super::{CONNECTOR, LISTENER};
use crate::core::{OnLeft, OnPoison};
use crate::message::Message;
use crate::wire::Malformed;
use crate::{Error, Operation, PeerStatus, Poison, Rank, Result};
use std::collections::VecDeque;

/// One end's view of the pair.
pub(crate) struct Protocol {
    rank: Rank,
    /// The exchange that this end has begun, and the number of those that it has finished.
    begun: Option<(u64, Operation)>,
    finished: u64,
    /// The peer's parts that have come: number, operation, payload.
    parts: VecDeque<(u64, Operation, Vec<u8>)>,
    pub poison: Option<Poison>,
    pub on_poison: Vec<OnPoison>,
    pub on_left: Vec<OnLeft>,
    pub peer: PeerStatus,
    /// The listener has formed the pair.
    pub confirmed: bool,
}

/// Callbacks to run once the state is unlocked.
#[derive(Default)]
pub(crate) struct News {
    pub poisoned: Option<(Vec<OnPoison>, Poison)>,
    pub left: Vec<OnLeft>,
}

impl Protocol {
    pub fn new(rank: Rank) -> Protocol {
        Protocol {
            rank,
            begun: None,
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

    /// The exchange that was begun and is not finished.
    pub fn begun(&self) -> Option<Operation> {
        self.begun.map(|(_, operation)| operation)
    }

    /// Begins an exchange; returns its message, or `None` if the same one was begun before.
    pub fn begin(&mut self, operation: Operation, payload: &[u8]) -> Result<Option<Message>> {
        match self.begun() {
            Some(begun) if begun == operation => return Ok(None),
            Some(begun) => {
                return Err(Error::OtherCall { peer: self.rank, theirs: begun, ours: operation });
            }
            None => {}
        }
        let sequence = self.finished;
        self.begun = Some((sequence, operation));
        let payload = payload.to_vec();
        Ok(Some(Message::Gather { generation: 0, sequence, operation, payload }))
    }

    /// The peer's part of the next exchange, if it has come.
    pub fn next_part(&self) -> Option<(Operation, &[u8])> {
        self.parts.front().map(|(_, operation, payload)| (*operation, payload.as_slice()))
    }

    /// Finishes the exchange that was begun, if the peer's part has come.
    pub fn finish(&mut self) -> Result<Option<Vec<u8>>> {
        let Some((sequence, ours)) = self.begun else { return Ok(None) };
        if self.parts.front().is_none_or(|(number, ..)| *number != sequence) {
            return Ok(None);
        }
        let Some((_, theirs, payload)) = self.parts.pop_front() else { return Ok(None) };
        (self.begun, self.finished) = (None, sequence + 1);
        if theirs != ours {
            return Err(Error::OtherCall { peer: self.peer_rank(), theirs, ours });
        }
        Ok(Some(payload))
    }

    /// Takes what the peer sent.
    ///
    /// # Errors
    /// The rule that it broke.
    pub fn receive(
        &mut self,
        message: Message,
        news: &mut News,
    ) -> std::result::Result<(), Malformed> {
        match message {
            Message::Gather { sequence, operation, payload, .. } => {
                // The peer is at most one exchange ahead: it needs this end's part to finish one.
                let next = self.parts.back().map_or(self.finished, |(number, ..)| number + 1);
                let begun = self.begun.map_or(self.finished, |(number, _)| number + 1);
                if sequence != next || sequence > begun {
                    return Err(Malformed("an exchange out of order"));
                }
                self.parts.push_back((sequence, operation, payload));
            }
            // The first one from the listener confirms that it has formed the pair.
            Message::Heartbeat => self.confirmed |= self.rank == CONNECTOR,
            Message::Poison { poison, .. } => {
                if self.poison.is_none() {
                    self.poisoned(poison, news);
                }
            }
            Message::Leave => {
                self.peer = PeerStatus::Left;
                log::debug!("{} of a pair has left", self.peer_rank());
                news.left.append(&mut self.on_left);
            }
            _ => return Err(Malformed("a message that pairs do not have")),
        }
        Ok(())
    }

    /// Notes the first cause.
    pub fn poisoned(&mut self, poison: Poison, news: &mut News) {
        log::info!("a pair is poisoned: {poison}");
        self.poison = Some(poison.clone());
        news.poisoned = Some((std::mem::take(&mut self.on_poison), poison));
    }
}
