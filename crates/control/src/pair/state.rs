//! A pair's control connection state: socket, protocol, and both ends' heartbeat clocks.

use super::protocol::{PairProtocol, PendingCallbacks};
use super::socket::{ConnectionEnd, FrameSocket};
use crate::message::Message;
use crate::{Cause, PeerStatus, Poison, Rank, Rounded};
use std::io::ErrorKind;
use std::time::{Duration, Instant};

/// Bounds on the silence timeout by which heartbeats are sent, whatever the peer requests.
const LONGEST_SILENCE: Duration = Duration::from_secs(3600);
const SHORTEST_SILENCE: Duration = Duration::from_millis(10);

pub(super) struct PairState {
    pub socket: FrameSocket,
    pub protocol: PairProtocol,
    pub left: bool,
    /// Both ends have formed the pair: a later end is a leave, an earlier one a failure.
    pub formed: bool,
    /// This end's silence timeout.
    silence: Duration,
    /// The peer's silence timeout.
    peer_silence: Duration,
    /// Time when the last heartbeat was sent.
    beat: Instant,
}

impl PairState {
    pub fn new(socket: FrameSocket, rank: Rank, silence: Duration) -> PairState {
        PairState {
            socket,
            protocol: PairProtocol::new(rank),
            left: false,
            formed: false,
            silence,
            peer_silence: silence,
            beat: Instant::now(),
        }
    }

    /// Receives available messages, at most one read turn; true if more may be available.
    pub fn poll(&mut self, callbacks: &mut PendingCallbacks) -> bool {
        self.socket.begin_turn();
        self.receive(callbacks);
        self.protocol.peer == PeerStatus::Alive && !self.left && self.socket.has_unread()
    }

    fn receive(&mut self, callbacks: &mut PendingCallbacks) {
        if self.protocol.peer != PeerStatus::Alive || self.left {
            return;
        }
        loop {
            match self.socket.receive() {
                Ok(Some(body)) => {
                    let received = Message::parse(&body)
                        .and_then(|message| self.protocol.receive(message, callbacks));
                    if let Err(malformed) = received {
                        return self.ended(ConnectionEnd::Protocol(malformed), callbacks);
                    }
                    if self.protocol.peer != PeerStatus::Alive {
                        return;
                    }
                }
                Ok(None) => break,
                Err(ended) => return self.ended(ended, callbacks),
            }
        }
        if self.socket.has_unsent()
            && let Err(error) = self.socket.flush()
        {
            self.ended(ConnectionEnd::Closed(error), callbacks);
        }
    }

    fn ended(&mut self, ended: ConnectionEnd, callbacks: &mut PendingCallbacks) {
        self.protocol.peer = PeerStatus::Lost;
        let (kind, detail) = match ended {
            ConnectionEnd::Closed(error) if error.kind() == ErrorKind::TimedOut => {
                (Cause::Silent, "its host did not acknowledge in time".to_owned())
            }
            ConnectionEnd::Closed(error) => (Cause::Lost, error.to_string()),
            ConnectionEnd::Protocol(malformed) => (Cause::Protocol, malformed.0.to_owned()),
            ConnectionEnd::Silent(silence) => {
                (Cause::Silent, format!("no sign of life for {}", Rounded(silence)))
            }
        };
        // The peer detects the closed connection.
        self.socket.shut_down();
        if self.protocol.poison.is_none() {
            let rank = Some(self.protocol.peer_rank());
            self.protocol.poisoned(Poison { kind, rank, detail }, callbacks);
        }
    }

    /// Sets the peer's silence timeout, by which heartbeats are sent.
    pub fn set_peer_silence(&mut self, silence: Duration) {
        self.peer_silence = silence.clamp(SHORTEST_SILENCE, LONGEST_SILENCE);
    }

    /// Heartbeat interval. Together with a tick it stays below a quarter of the peer's timeout.
    fn interval(&self) -> Duration {
        self.peer_silence / 5
    }

    /// [`PairState::keep_time`] interval.
    pub fn tick(&self) -> Duration {
        (self.interval() / 4).min(self.silence / 10)
    }

    /// Sends a due heartbeat, and ends the pair if the peer was silent for the silence timeout. `late`: time
    /// for which this process did not run, which does not count as silence.
    pub fn keep_time(&mut self, now: Instant, late: Duration, callbacks: &mut PendingCallbacks) {
        if !self.formed || self.protocol.peer != PeerStatus::Alive || self.left {
            return;
        }
        let last_received = self.socket.last_received;
        self.socket.last_received = (last_received + late).min(now.max(last_received));
        let last_received = self.socket.last_received;
        if now.saturating_duration_since(last_received) > self.silence {
            // Buffered bytes are received before silence is concluded.
            self.poll(callbacks);
            if self.protocol.peer == PeerStatus::Alive && self.socket.last_received == last_received
            {
                self.ended(ConnectionEnd::Silent(self.silence), callbacks);
            }
        } else if now.saturating_duration_since(self.beat) >= self.interval()
            && !self.socket.has_unsent()
        {
            self.beat = now;
            self.send(&Message::Heartbeat, callbacks);
        }
    }

    pub fn send(&mut self, message: &Message, callbacks: &mut PendingCallbacks) {
        if self.protocol.peer == PeerStatus::Lost {
            return;
        }
        if self.socket.send(&message.frame()).is_err() {
            // Receive the messages that arrived before the connection broke, such as a leave.
            self.poll(callbacks);
        }
    }
}
