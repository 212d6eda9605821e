//! Rendezvous listener: admits expected ranks only.
//!
//! One loop over non-blocking sockets, so slow, flooding or malformed connections delay no rank: each has
//! [`HANDSHAKE_TIMEOUT`] and only its own frame memory.

use crate::deadline::timespec;
use crate::dial::EXHAUSTED_TIME;
use crate::fork_guard::{self, Registration};
use crate::handshake::{
    Acceptor, AcceptorStep, HANDSHAKE_TIMEOUT, HandshakeError, Identity, JobId, Refusal,
};
use crate::neighbour::{self, OTHER_USER, SHORTAGE, Stranger};
use crate::wire::{FrameParser, MAX_FRAME, MAX_UNAUTHENTICATED_FRAME};
use crate::{Error, Rank, Result, limits};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Reason to reject a connection that ended before the handshake.
const CLOSED_EARLY: &str = "the connection was closed during the handshake";
/// Unauthenticated connections kept besides one for each expected rank.
const SPARE_CONNECTIONS: usize = 128;
/// Connections accepted before pending ones are read and the deadline is checked.
const MAX_ACCEPTS: usize = 64;

/// Rank that has passed the handshake, and its connection.
pub(crate) struct AuthenticatedRank {
    pub rank: Rank,
    pub details: Vec<u8>,
    pub stream: TcpStream,
    pub parser: FrameParser,
}

/// Listening socket with pending handshakes.
pub(crate) struct RankListener {
    _guard: Registration,
    listener: TcpListener,
    identity: Identity,
    job: JobId,
    require_job: bool,
    expected: BTreeSet<Rank>,
    joined: BTreeSet<Rank>,
    pending: VecDeque<PendingConnection>,
    /// First time at which no connection could be accepted.
    exhausted_since: Option<Instant>,
    /// Rejected connections, counted by reason.
    rejected: BTreeMap<&'static str, u64>,
}

/// Accepted connection in the handshake.
struct PendingConnection {
    stream: TcpStream,
    parser: FrameParser,
    acceptor: Acceptor,
    since: Instant,
}

impl RankListener {
    /// `require_job`: dialers must present the job id. Ranks that dial rank 0 do not have it yet.
    pub(crate) fn new(
        listener: TcpListener,
        identity: Identity,
        job: JobId,
        require_job: bool,
        expected: BTreeSet<Rank>,
    ) -> Result<RankListener> {
        listener.set_nonblocking(true).map_err(Error::system("setting up the listener"))?;
        Ok(RankListener {
            _guard: fork_guard::register(&listener),
            listener,
            identity,
            job,
            require_job,
            expected,
            joined: BTreeSet::new(),
            pending: VecDeque::new(),
            exhausted_since: None,
            rejected: BTreeMap::new(),
        })
    }

    /// Expected ranks that have not joined.
    pub(crate) fn missing(&self) -> Vec<Rank> {
        self.expected.difference(&self.joined).copied().collect()
    }

    /// Accepts `rank` again after the connection was lost.
    pub(crate) fn expect_again(&mut self, rank: Rank) {
        self.joined.remove(&rank);
    }

    /// Serves the sockets until a rank is admitted or `timeout` has passed, whatever the connection count.
    pub(crate) fn serve(&mut self, timeout: Duration) -> Result<Vec<AuthenticatedRank>> {
        let started = Instant::now();
        let mut authenticated = Vec::new();
        loop {
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() || !authenticated.is_empty() {
                return Ok(authenticated);
            }
            self.wait(left)?;
            self.accept()?;
            for _ in 0..self.pending.len() {
                let Some(mut connection) = self.pending.pop_front() else { break };
                match self.advance(&mut connection) {
                    Ok(None) => self.pending.push_back(connection),
                    Ok(Some((rank, details))) => {
                        authenticated.push(self.admit(rank, details, connection))
                    }
                    Err(reason) => self.record_rejection(reason),
                }
            }
        }
    }

    fn wait(&self, timeout: Duration) -> Result<()> {
        let mut sockets = vec![PollFd::new(&self.listener, PollFlags::IN)];
        sockets.extend(self.pending.iter().map(|s| PollFd::new(&s.stream, PollFlags::IN)));
        let next_expiry = self.pending.iter().map(|s| s.since + HANDSHAKE_TIMEOUT).min();
        let until_expiry = next_expiry.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = until_expiry.map_or(timeout, |expiry| timeout.min(expiry));
        match poll(&mut sockets, Some(&timespec(timeout))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Error::system("waiting for connections")(error)),
        }
    }

    /// Accepts up to [`MAX_ACCEPTS`] connections; the oldest pending ones make room.
    fn accept(&mut self) -> Result<()> {
        for _ in 0..MAX_ACCEPTS {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.exhausted_since = None;
                    break;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if !limits::is_exhausted(&error) => {
                    self.record_rejection("the connection could not be accepted");
                    break;
                }
                Err(error) => {
                    // Pending handshakes end soon and free theirs.
                    let since = *self.exhausted_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= EXHAUSTED_TIME {
                        return Err(Error::system("accepting the other ranks")(error));
                    }
                    self.record_rejection("the connection could not be accepted");
                    std::thread::sleep(Duration::from_millis(10));
                    break;
                }
            };
            self.exhausted_since = None;
            if stream.set_nonblocking(true).and(stream.set_nodelay(true)).is_err() {
                continue;
            }
            if self.pending.len() >= self.expected.len() + SPARE_CONNECTIONS {
                self.pending.pop_front();
                self.record_rejection("too many connections at once");
            }
            self.pending.push_back(PendingConnection {
                stream,
                parser: FrameParser::new(MAX_UNAUTHENTICATED_FRAME),
                acceptor: Acceptor::new(self.identity.clone(), self.job, self.require_job),
                since: Instant::now(),
            });
        }
        Ok(())
    }

    /// Advances a handshake by the bytes received. The error is the reason for the rejection.
    fn advance(
        &self,
        connection: &mut PendingConnection,
    ) -> std::result::Result<Option<(Rank, Vec<u8>)>, &'static str> {
        if connection.since.elapsed() > HANDSHAKE_TIMEOUT {
            return Err("the handshake took too long");
        }
        let mut bytes = [0; MAX_UNAUTHENTICATED_FRAME];
        match connection.stream.read(&mut bytes) {
            Ok(0) => return Err(CLOSED_EARLY),
            Ok(count) => connection.parser.feed(bytes.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(None),
            Err(_) => return Err("the connection failed during the handshake"),
        }
        while let Some(frame) = connection.parser.next().map_err(|malformed| malformed.0)? {
            match connection.acceptor.receive(&frame) {
                Ok(AcceptorStep::Send(frame)) => {
                    connection
                        .stream
                        .write_all(&frame)
                        .map_err(|_| "the response could not be sent")?;
                }
                Ok(AcceptorStep::Authenticated { rank, details }) => {
                    let user = match self.identity.key.is_public() {
                        true => neighbour::check(&connection.stream),
                        false => Ok(()),
                    };
                    let refusal = if let Err(Stranger::Exhausted(_)) = user {
                        // The rank tries again.
                        return Err(SHORTAGE);
                    } else if let Err(Stranger::Gone(_)) = user {
                        return Err(CLOSED_EARLY);
                    } else if user.is_err() {
                        Refusal::OtherUser(neighbour::own_user())
                    } else if !self.expected.contains(&rank) {
                        Refusal::NotExpected
                    } else if self.joined.contains(&rank) {
                        Refusal::DuplicateRank
                    } else {
                        return Ok(Some((rank, details)));
                    };
                    let _ = connection.stream.write_all(&refusal.frame());
                    return Err(reason(refusal));
                }
                Err(HandshakeError::Reject(refusal)) => {
                    let _ = connection.stream.write_all(&refusal.frame());
                    return Err(reason(refusal));
                }
                Err(HandshakeError::Malformed(malformed)) => return Err(malformed.0),
                Err(_) => return Err("the handshake failed"),
            }
        }
        Ok(None)
    }

    fn admit(
        &mut self,
        rank: Rank,
        details: Vec<u8>,
        connection: PendingConnection,
    ) -> AuthenticatedRank {
        let PendingConnection { mut stream, mut parser, acceptor, .. } = connection;
        self.joined.insert(rank);
        parser.set_limit(MAX_FRAME);
        // A failed welcome shows as a broken connection later.
        let _ = acceptor.welcome().map(|frame| stream.write_all(&frame));
        AuthenticatedRank { rank, details, stream, parser }
    }

    fn record_rejection(&mut self, reason: &'static str) {
        let count = self.rejected.entry(reason).or_default();
        *count += 1;
        if *count == 1 {
            // Ranks that split a group probe rank 0's addresses with empty connections.
            let early = reason == CLOSED_EARLY;
            let level = if early { log::Level::Info } else { log::Level::Warn };
            log::log!(level, "connection rejected: {reason}");
        }
    }
}

impl Drop for RankListener {
    fn drop(&mut self) {
        for (reason, count) in &self.rejected {
            log::info!("connections rejected during rendezvous: {count} ({reason})");
        }
    }
}

fn reason(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::Version(_) => "it uses another wire version",
        Refusal::WrongSecret => "it has another secret",
        Refusal::WorldSize(_) => "it was started with another world size",
        Refusal::OtherUser(_) => OTHER_USER,
        Refusal::DuplicateRank => "its rank has joined already",
        Refusal::NotExpected => "it belongs to another job, or its rank is not expected here",
        Refusal::TlsDemanded => "it does not use TLS",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WIRE_VERSIONS;
    use crate::secret::Key;

    #[test]
    fn one_turn_accepts_a_part_of_a_flood_and_the_oldest_make_room() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let identity = Identity {
            rank: Rank(0),
            world_size: 2,
            key: Key::new(None),
            versions: WIRE_VERSIONS,
            magic: crate::handshake::GROUP_MAGIC,
        };
        let mut listener =
            RankListener::new(listener, identity, [0; 16], false, [Rank(1)].into()).unwrap();
        let mut flood = Vec::new();
        for turn in 1..=4 {
            // More than one turn accepts, fewer than the system queues.
            flood.extend((0..100).map(|_| TcpStream::connect(address).unwrap()));
            listener.accept().unwrap();
            let kept = (turn * MAX_ACCEPTS).min(1 + SPARE_CONNECTIONS);
            assert_eq!(listener.pending.len(), kept, "turn {turn}");
            // Drop the rest, which would fill the queue.
            (0..100 - MAX_ACCEPTS).for_each(|_| drop(listener.listener.accept().unwrap()));
        }
    }
}
