//! State of a pair's control connection, and what each message does to it.

use super::socket::{Ended, FrameSocket};
use super::{CONNECTOR, PairControl};
use crate::core::{OnLeft, OnPoison};
use crate::message::Message;
use crate::wire::Malformed;
use crate::{Cause, Operation, PeerStatus, Poison};
use std::collections::VecDeque;
use std::io::ErrorKind;

pub(super) struct State {
    pub socket: FrameSocket,
    /// Exchanges that this end has begun and finished.
    pub begun: Option<(u64, Operation)>,
    pub finished: u64,
    /// The peer's parts that have come: number, operation, payload.
    pub parts: VecDeque<(u64, Operation, Vec<u8>)>,
    pub poison: Option<Poison>,
    pub on_poison: Vec<OnPoison>,
    pub on_left: Vec<OnLeft>,
    pub peer: PeerStatus,
    pub left: bool,
    /// Both ends have all that a pair needs: its end is a goodbye, before that it is a failure.
    pub formed: bool,
    /// The listener has formed the pair.
    pub confirmed: bool,
}

/// Callbacks to run once the state is unlocked.
#[derive(Default)]
pub(super) struct News {
    pub poisoned: Option<(Vec<OnPoison>, Poison)>,
    pub left: Vec<OnLeft>,
}

impl State {
    pub fn new(socket: FrameSocket) -> State {
        State {
            socket,
            begun: None,
            finished: 0,
            parts: VecDeque::new(),
            poison: None,
            on_poison: Vec::new(),
            on_left: Vec::new(),
            peer: PeerStatus::Alive,
            left: false,
            formed: false,
            confirmed: false,
        }
    }

    pub fn poll(&mut self, control: &PairControl, news: &mut News) {
        if self.peer != PeerStatus::Alive || self.left {
            return;
        }
        loop {
            match self.socket.receive() {
                Ok(Some(body)) => {
                    let message = Message::parse(&body).map_err(Ended::Protocol);
                    let taken = message.and_then(|message| self.take(message, control, news));
                    if let Err(ended) = taken {
                        return self.ended(ended, control, news);
                    }
                    if self.peer != PeerStatus::Alive {
                        return;
                    }
                }
                Ok(None) => break,
                Err(ended) => return self.ended(ended, control, news),
            }
        }
        if self.socket.has_unsent()
            && let Err(error) = self.socket.flush()
        {
            self.ended(Ended::Closed(error), control, news);
        }
    }

    fn take(
        &mut self,
        message: Message,
        control: &PairControl,
        news: &mut News,
    ) -> std::result::Result<(), Ended> {
        let refuse = |what| Err(Ended::Protocol(Malformed(what)));
        match message {
            Message::Gather { sequence, operation, payload, .. } => {
                // The peer is at most one exchange ahead: it needs this end's part to finish one.
                let next = self.parts.back().map_or(self.finished, |(number, ..)| number + 1);
                let begun = self.begun.map_or(self.finished, |(number, _)| number + 1);
                if sequence != next || sequence > begun {
                    return refuse("an exchange out of order");
                }
                self.parts.push_back((sequence, operation, payload));
            }
            Message::Heartbeat if control.rank() == CONNECTOR => self.confirmed = true,
            Message::Poison { poison, .. } => {
                if self.poison.is_none() {
                    self.poisoned(poison, news);
                }
            }
            Message::Leave => {
                self.peer = PeerStatus::Left;
                log::debug!("{} of a pair has left", control.peer());
                news.left.append(&mut self.on_left);
            }
            _ => return refuse("a message that pairs do not have"),
        }
        Ok(())
    }

    fn ended(&mut self, ended: Ended, control: &PairControl, news: &mut News) {
        self.peer = PeerStatus::Lost;
        let (kind, detail) = match ended {
            Ended::Closed(error) if error.kind() == ErrorKind::TimedOut => {
                (Cause::Silent, "its host did not acknowledge in time".to_owned())
            }
            Ended::Closed(error) => (Cause::Lost, error.to_string()),
            Ended::Protocol(malformed) => (Cause::Protocol, malformed.0.to_owned()),
        };
        // The peer finds the end of the connection.
        self.socket.shut_down();
        if self.poison.is_none() {
            self.poisoned(Poison { kind, rank: Some(control.peer()), detail }, news);
        }
    }

    pub fn poisoned(&mut self, poison: Poison, news: &mut News) {
        log::info!("a pair is poisoned: {poison}");
        self.poison = Some(poison.clone());
        news.poisoned = Some((std::mem::take(&mut self.on_poison), poison));
    }

    pub fn send(&mut self, control: &PairControl, message: &Message, news: &mut News) {
        if self.peer == PeerStatus::Lost {
            return;
        }
        if self.socket.send(&message.frame()).is_err() {
            // What came before the connection broke, a goodbye above all, is still to be received.
            self.poll(control, news);
        }
    }
}
