//! State of a pair's control connection: its socket, its protocol, and the clocks of both ends.

use super::protocol::{News, Protocol};
use super::socket::{Ended, FrameSocket};
use crate::message::Message;
use crate::{Cause, PeerStatus, Poison, Rank};
use std::io::ErrorKind;
use std::time::{Duration, Instant};

/// The longest and shortest silence timeout by which heartbeats are sent, whatever the peer asks for.
const LONGEST_SILENCE: Duration = Duration::from_secs(3600);
const SHORTEST_SILENCE: Duration = Duration::from_millis(10);

pub(super) struct State {
    pub socket: FrameSocket,
    pub protocol: Protocol,
    pub left: bool,
    /// Both ends have all that a pair needs: its end is a goodbye, before that it is a failure.
    pub formed: bool,
    /// Silence of the peer after which it counts as lost.
    silence: Duration,
    /// Silence of this end after which the peer counts it as lost.
    peer_silence: Duration,
    /// When a heartbeat was sent last.
    beat: Instant,
}

impl State {
    pub fn new(socket: FrameSocket, rank: Rank, silence: Duration) -> State {
        State {
            socket,
            protocol: Protocol::new(rank),
            left: false,
            formed: false,
            silence,
            peer_silence: silence,
            beat: Instant::now(),
        }
    }

    /// Receives what has come, at most a turn's worth; returns whether there may be more.
    pub fn poll(&mut self, news: &mut News) -> bool {
        self.socket.begin_turn();
        self.receive(news);
        self.protocol.peer == PeerStatus::Alive && !self.left && self.socket.has_unread()
    }

    fn receive(&mut self, news: &mut News) {
        if self.protocol.peer != PeerStatus::Alive || self.left {
            return;
        }
        loop {
            match self.socket.receive() {
                Ok(Some(body)) => {
                    let received = Message::parse(&body)
                        .and_then(|message| self.protocol.receive(message, news));
                    if let Err(malformed) = received {
                        return self.ended(Ended::Protocol(malformed), news);
                    }
                    if self.protocol.peer != PeerStatus::Alive {
                        return;
                    }
                }
                Ok(None) => break,
                Err(ended) => return self.ended(ended, news),
            }
        }
        if self.socket.has_unsent()
            && let Err(error) = self.socket.flush()
        {
            self.ended(Ended::Closed(error), news);
        }
    }

    fn ended(&mut self, ended: Ended, news: &mut News) {
        self.protocol.peer = PeerStatus::Lost;
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
        if self.protocol.poison.is_none() {
            let rank = Some(self.protocol.peer_rank());
            self.protocol.poisoned(Poison { kind, rank, detail }, news);
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
    pub fn keep_time(&mut self, now: Instant, late: Duration, news: &mut News) {
        if !self.formed || self.protocol.peer != PeerStatus::Alive || self.left {
            return;
        }
        let heard = self.socket.heard;
        self.socket.heard = (heard + late).min(now.max(heard));
        let heard = self.socket.heard;
        if now.saturating_duration_since(heard) > self.silence {
            // What has come is received before it is missed.
            self.poll(news);
            if self.protocol.peer == PeerStatus::Alive && self.socket.heard == heard {
                self.ended(Ended::Silent(self.silence), news);
            }
        } else if now.saturating_duration_since(self.beat) >= self.interval()
            && !self.socket.has_unsent()
        {
            self.beat = now;
            self.send(&Message::Heartbeat, news);
        }
    }

    pub fn send(&mut self, message: &Message, news: &mut News) {
        if self.protocol.peer == PeerStatus::Lost {
            return;
        }
        if self.socket.send(&message.frame()).is_err() {
            // What came before the connection broke, a goodbye above all, is still to be received.
            self.poll(news);
        }
    }
}
