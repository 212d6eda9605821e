//! State of a pair's control connection, and what each message does to it.

use super::socket::{Ended, FrameSocket};
use super::{CONNECTOR, PairControl};
use crate::core::{OnLeft, OnPoison};
use crate::message::Message;
use crate::wire::Malformed;
use crate::{Cause, Operation, PeerStatus, Poison};
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

/// The longest and shortest silence timeout by which heartbeats are sent, whatever the peer asks for.
const LONGEST_SILENCE: Duration = Duration::from_secs(3600);
const SHORTEST_SILENCE: Duration = Duration::from_millis(10);

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
    /// Silence of the peer after which it counts as lost.
    silence: Duration,
    /// Silence of this end after which the peer counts it as lost.
    peer_silence: Duration,
    /// When a heartbeat was sent last.
    beat: Instant,
}

/// Callbacks to run once the state is unlocked.
#[derive(Default)]
pub(super) struct News {
    pub poisoned: Option<(Vec<OnPoison>, Poison)>,
    pub left: Vec<OnLeft>,
}

impl State {
    pub fn new(socket: FrameSocket, silence: Duration) -> State {
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
            silence,
            peer_silence: silence,
            beat: Instant::now(),
        }
    }

    /// Receives what has come, at most a turn's worth; returns whether there may be more.
    pub fn poll(&mut self, control: &PairControl, news: &mut News) -> bool {
        self.socket.begin_turn();
        self.receive(control, news);
        self.peer == PeerStatus::Alive && !self.left && self.socket.has_unread()
    }

    fn receive(&mut self, control: &PairControl, news: &mut News) {
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
            // The first one from the listener confirms that it has formed the pair.
            Message::Heartbeat => self.confirmed |= control.rank() == CONNECTOR,
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
            Ended::Silent(silence) => (Cause::Silent, format!("no sign of life for {silence:.1?}")),
        };
        // The peer finds the end of the connection.
        self.socket.shut_down();
        if self.poison.is_none() {
            self.poisoned(Poison { kind, rank: Some(control.peer()), detail }, news);
        }
    }

    /// Takes over the peer's silence timeout, by which heartbeats are sent.
    pub fn set_peer_silence(&mut self, silence: Duration) {
        self.peer_silence = silence.clamp(SHORTEST_SILENCE, LONGEST_SILENCE);
    }

    /// Time between two heartbeats. With a tick in between it stays below a quarter of the peer's timeout.
    fn interval(&self) -> Duration {
        self.peer_silence / 5
    }

    /// How often [`State::keep_time`] is due.
    pub fn tick(&self) -> Duration {
        (self.interval() / 4).min(self.silence / 10)
    }

    /// Sends a heartbeat if one is due, and ends the pair if the peer was silent for too long. `late` is
    /// time for which this process did not run: the silence was its own.
    pub fn keep_time(
        &mut self,
        control: &PairControl,
        now: Instant,
        late: Duration,
        news: &mut News,
    ) {
        if !self.formed || self.peer != PeerStatus::Alive || self.left {
            return;
        }
        let heard = self.socket.heard;
        self.socket.heard = (heard + late).min(now.max(heard));
        let heard = self.socket.heard;
        if now.saturating_duration_since(heard) > self.silence {
            // What has come is received before it is missed.
            self.poll(control, news);
            if self.peer == PeerStatus::Alive && self.socket.heard == heard {
                self.ended(Ended::Silent(self.silence), control, news);
            }
        } else if now.saturating_duration_since(self.beat) >= self.interval()
            && !self.socket.has_unsent()
        {
            self.beat = now;
            self.send(control, &Message::Heartbeat, news);
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
