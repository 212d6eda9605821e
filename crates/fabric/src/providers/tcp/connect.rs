//! Connections to all peers at once, with a bound on unknown ones.
//!
//! In each pair the higher rank dials. The lower listens before it sends an introduction with the port,
//! so that a dialer finds it open, and no connecting order can deadlock. Both ends send a hello with the
//! token that the other issued to them over the control plane. Connections without a valid hello are
//! counted and closed; the port closes once the group is complete.

use super::config::TcpCounters;
use super::handshake::{HelloReader, dial, send_hello};
use super::wire::{HELLO, Hello, Role, TcpAddress, Token, same_token};
use crate::clock;
use crate::error::{Error, Result};
use crate::link::Membership;
use crate::local::WaitLimit;
use crate::types::{ProviderKind, Time};
use crate::unproven::{MAX_UNPROVEN, UnprovenConnections};
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, SocketFlags};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;
use weft_control::{Rank, limits};

/// Delay before a dialer retries a connection that closed before the response.
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// Delay before the next accept when this process has no descriptor left.
const DESCRIPTOR_DELAY: Duration = Duration::from_millis(10);
/// Time for which a rank waits for a descriptor.
const EXHAUSTED_TIME: Duration = Duration::from_secs(1);

/// Stream send buffer within one host. Beyond this, bytes leave the processor's cache before they are
/// received.
const SAME_HOST_BUFFER: usize = 512 << 10;

const LISTENER: u64 = u64::MAX;
const ATTEMPT: u64 = 1 << 63;

/// Longest sleep between two [`WaitLimit`] checks.
const MAX_PARK: Duration = Duration::from_millis(50);

/// Link fields that the connector uses.
pub(super) struct ConnectContext<'a> {
    pub group: &'a Membership,
    pub address: &'a TcpAddress,
    /// `None` if this rank dials all peers.
    pub listener: Option<Listener<'a>>,
    pub counters: &'a TcpCounters,
}

/// Listening socket, and the address at which peers dial it.
pub(super) struct Listener<'a> {
    pub socket: &'a OwnedFd,
    pub address: SocketAddr,
}

/// Peer to connect.
pub(super) struct ExpectedPeer {
    pub rank: Rank,
    pub address: TcpAddress,
    /// Socket that it listens on, if this rank dials.
    pub at: SocketAddr,
    /// Token issued to the peer, which it presents.
    pub issued: Token,
    /// Token issued by the peer.
    pub shown: Token,
    /// Stream count, by the pair's rule.
    pub streams: u32,
}

/// Peer and stream sockets, in order.
pub(super) type Connected = (Rank, Vec<OwnedFd>);

/// Limits a stream's send buffer within this host.
pub(super) fn limit_buffer(socket: impl AsFd) {
    // A refusal only slows down long writes.
    let _ = net::sockopt::set_socket_send_buffer_size(socket, SAME_HOST_BUFFER);
}

/// Connects these peers.
///
/// # Errors
/// Names a peer that is missing at the deadline.
pub(super) fn connect(
    context: &ConnectContext<'_>,
    expected: Vec<ExpectedPeer>,
    limit: &mut WaitLimit<'_>,
) -> Result<Vec<Connected>> {
    let mut connector = Connector::new(context, expected)?;
    let system = |e| Error::system("cannot wait for connections", e);
    let flags = epoll::EventFlags::IN;
    if let Some(Listener { socket, .. }) = &context.listener {
        let data = epoll::EventData::new_u64(LISTENER);
        epoll::add(&connector.epoll, socket, data, flags).map_err(system)?;
    }
    let mut events = Vec::with_capacity(64);
    while !connector.is_complete() {
        (limit.give_up)()?;
        let now = clock::now();
        if now >= limit.deadline {
            return Err(connector.timeout_error());
        }
        let wait = connector.start_due(now)?.min(limit.deadline).since(now).min(MAX_PARK);
        let timeout = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        events.clear();
        match epoll::wait(
            &connector.epoll,
            rustix::buffer::spare_capacity(&mut events),
            Some(&timeout),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(system(e)),
        }
        for event in &events {
            match { event.data }.u64() {
                LISTENER => connector.accept()?,
                data if data & ATTEMPT != 0 => {
                    connector.attempt_ready((data & !ATTEMPT) as usize)?
                }
                data => connector.pending_ready(data),
            }
        }
    }
    let ranks = connector.expected.iter().map(|peer| peer.rank);
    let sockets =
        connector.sockets.into_iter().map(|sockets| sockets.into_iter().flatten().collect());
    Ok(ranks.zip(sockets).collect())
}

/// Outgoing connection for one stream.
struct DialAttempt {
    /// Peer index in `expected`.
    peer: usize,
    stream: u32,
    state: DialState,
    /// Reason why the previous attempt ended.
    failure: Option<String>,
}

enum DialState {
    RetryAt(Time),
    Connecting(OwnedFd),
    AwaitingHello(OwnedFd, HelloReader),
    Connected,
}

/// Accepted connection whose hello is incomplete.
struct PendingConnection {
    socket: OwnedFd,
    hello: HelloReader,
}

struct Connector<'a> {
    context: &'a ConnectContext<'a>,
    epoll: OwnedFd,
    expected: Vec<ExpectedPeer>,
    /// Stream sockets to each expected peer; `None` until connected.
    sockets: Vec<Vec<Option<OwnedFd>>>,
    attempts: Vec<DialAttempt>,
    pending: UnprovenConnections<PendingConnection>,
    /// Time since which no connection could be accepted.
    exhausted_since: Option<Time>,
}

impl<'a> Connector<'a> {
    fn new(context: &'a ConnectContext<'a>, expected: Vec<ExpectedPeer>) -> Result<Self> {
        let (mut attempts, mut sockets) = (Vec::new(), Vec::new());
        for (peer, ExpectedPeer { rank, streams, .. }) in expected.iter().enumerate() {
            if context.group.rank > *rank {
                let dial = |stream| {
                    let state = DialState::RetryAt(Time(0));
                    DialAttempt { peer, stream, state, failure: None }
                };
                attempts.extend((0..*streams).map(dial));
            }
            sockets.push((0..*streams).map(|_| None).collect());
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| Error::system("cannot create an epoll descriptor", e))?;
        Ok(Connector {
            context,
            epoll,
            expected,
            sockets,
            attempts,
            pending: UnprovenConnections::new(),
            exhausted_since: None,
        })
    }

    fn is_complete(&self) -> bool {
        self.sockets.iter().flatten().all(Option::is_some)
    }

    /// Error that names a peer which is missing at the deadline.
    fn timeout_error(&self) -> Error {
        let missing = self.sockets.iter().position(|sockets| sockets.iter().any(Option::is_none));
        let Some(number) = missing else { return Error::Interrupted };
        let peer = &self.expected[number];
        let dial = self
            .attempts
            .iter()
            .find(|d| d.peer == number && !matches!(d.state, DialState::Connected));
        let detail = match dial {
            Some(DialAttempt { failure: Some(why), .. }) => {
                format!("no response from {} before the deadline; {why}", peer.at)
            }
            Some(_) => format!("no response from {} before the deadline", peer.at),
            None => format!(
                "no connection to {} before the deadline; check that the peer can reach this address",
                self.here()
            ),
        };
        failed(peer.rank, detail)
    }

    /// Address at which peers dial this rank.
    fn here(&self) -> SocketAddr {
        let listener = self.context.listener.as_ref();
        listener.map_or(SocketAddr::new(self.context.address.ip, 0), |listener| listener.address)
    }

    fn hello(&self, peer: &ExpectedPeer, role: Role, stream: u32) -> [u8; HELLO] {
        Hello {
            generation: self.context.group.generation,
            role,
            from: self.context.group.rank.0,
            to: peer.rank.0,
            stream,
            token: peer.shown,
        }
        .encode()
    }

    /// Starts the attempts that are due and drops expired pending connections; returns the time for the
    /// next call.
    fn start_due(&mut self, now: Time) -> Result<Time> {
        let mut next = Time::MAX;
        for index in 0..self.attempts.len() {
            let DialState::RetryAt(at) = self.attempts[index].state else { continue };
            if at > now {
                next = next.min(at);
                continue;
            }
            let peer = &self.expected[self.attempts[index].peer];
            let to = peer.at;
            let socket = dial(to).map_err(|e| dial_error(peer.rank, to, e.into()))?;
            let data = epoll::EventData::new_u64(ATTEMPT | index as u64);
            epoll::add(&self.epoll, &socket, data, epoll::EventFlags::OUT)
                .map_err(|e| Error::system("cannot wait for a connection", e))?;
            self.attempts[index].state = DialState::Connecting(socket);
        }
        while self.pending.drop_expired(now).is_some() {
            self.reject("no hello before the time limit");
        }
        Ok(self.pending.next_expiry().map_or(next, |expires| expires.min(next)))
    }

    fn attempt_ready(&mut self, index: usize) -> Result<()> {
        let Some(attempt) = self.attempts.get_mut(index) else { return Ok(()) };
        let (number, stream) = (attempt.peer, attempt.stream);
        let state = std::mem::replace(&mut attempt.state, DialState::Connected);
        let peer = &self.expected[number];
        let state = match state {
            DialState::Connecting(socket) => {
                let to = peer.at;
                let refused = |e: Errno| failed(peer.rank, format!("{to}: {e}"));
                net::sockopt::socket_error(&socket).map_err(refused)?.map_err(refused)?;
                let hello = self.hello(peer, Role::Dialer, stream);
                if send_hello(&socket, &hello) {
                    let data = epoll::EventData::new_u64(ATTEMPT | index as u64);
                    epoll::modify(&self.epoll, &socket, data, epoll::EventFlags::IN)
                        .map_err(|e| Error::system("cannot wait for a connection", e))?;
                    DialState::AwaitingHello(socket, HelloReader::default())
                } else {
                    DialState::RetryAt(clock::now().after(RETRY_DELAY))
                }
            }
            DialState::AwaitingHello(socket, mut hello) => match hello.read(&socket) {
                Ok(None) => DialState::AwaitingHello(socket, hello),
                Ok(Some(bytes)) => {
                    let rank = peer.rank;
                    self.check_response(&bytes, rank, stream).map_err(|why| {
                        let to = self.expected[number].at;
                        failed(rank, format!("{to} is not the engine of this rank: {why}"))
                    })?;
                    self.add_stream(number, stream, socket);
                    DialState::Connected
                }
                Err(why) => {
                    self.attempts[index].failure = Some(why.into());
                    DialState::RetryAt(clock::now().after(RETRY_DELAY))
                }
            },
            state => state,
        };
        self.attempts[index].state = state;
        Ok(())
    }

    fn check_response(
        &self,
        bytes: &[u8; HELLO],
        rank: Rank,
        stream: u32,
    ) -> Result<(), &'static str> {
        let (hello, _) = self.check_hello(bytes, Role::Acceptor)?;
        if hello.from != rank.0 || hello.stream != stream {
            return Err("hello of another rank or stream");
        }
        Ok(())
    }

    /// Validates a hello; returns it with the sender's index in `expected`.
    fn check_hello(&self, bytes: &[u8; HELLO], role: Role) -> Result<(Hello, usize), &'static str> {
        let hello = Hello::decode(bytes)?;
        let peer = self.expected.iter().position(|peer| peer.rank.0 == hello.from);
        let peer = peer.ok_or("unexpected rank")?;
        if !same_token(&hello.token, &self.expected[peer].issued) {
            return Err("wrong token for its rank");
        }
        if hello.generation != self.context.group.generation {
            return Err("another generation");
        }
        if hello.role != role || hello.to != self.context.group.rank.0 {
            return Err("hello for another rank");
        }
        Ok((hello, peer))
    }

    fn accept(&mut self) -> Result<()> {
        let Some(Listener { socket: listener, .. }) = &self.context.listener else {
            return Ok(());
        };
        for _ in 0..MAX_UNPROVEN {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match net::accept_with(listener, flags) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => {
                    self.exhausted_since = None;
                    break;
                }
                // These errors concern the connection, not the listener.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => continue,
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                    // The oldest pending connection frees a descriptor for the next.
                    if self.pending.drop_oldest().is_none() {
                        let now = clock::now();
                        let since = *self.exhausted_since.get_or_insert(now);
                        if now.since(since) >= EXHAUSTED_TIME {
                            return Err(Error::system("cannot accept connections", error));
                        }
                        std::thread::sleep(DESCRIPTOR_DELAY);
                    }
                    self.reject("no file descriptors left");
                    break;
                }
                Err(e) => return Err(Error::system("cannot accept connections", e)),
            };
            self.exhausted_since = None;
            let connection = PendingConnection { socket, hello: HelloReader::default() };
            let (id, dropped) = self.pending.add(connection, clock::now());
            if dropped.is_some() {
                self.reject("too many connections without a hello");
            }
            let data = epoll::EventData::new_u64(id);
            if let Some(PendingConnection { socket, .. }) = self.pending.get_mut(id) {
                epoll::add(&self.epoll, socket, data, epoll::EventFlags::IN)
                    .map_err(|e| Error::system("cannot wait for a connection", e))?;
            }
            // A peer's hello usually arrives with the connection.
            self.pending_ready(id);
        }
        Ok(())
    }

    fn pending_ready(&mut self, id: u64) {
        let Some(connection) = self.pending.get_mut(id) else { return };
        let outcome = match connection.hello.read(&connection.socket) {
            Ok(None) => return,
            Ok(Some(bytes)) => self.identify(&bytes),
            Err(why) => Err(why),
        };
        let Some(connection) = self.pending.take(id) else { return };
        match outcome {
            Ok((peer, stream)) => {
                let hello = self.hello(&self.expected[peer], Role::Acceptor, stream);
                if send_hello(&connection.socket, &hello) {
                    self.add_stream(peer, stream, connection.socket);
                }
            }
            Err(why) => self.reject(why),
        }
    }

    /// Peer index in `expected`, and stream, from a dialer's hello.
    fn identify(&self, bytes: &[u8; HELLO]) -> Result<(usize, u32), &'static str> {
        let (hello, peer) = self.check_hello(bytes, Role::Dialer)?;
        if hello.from <= self.context.group.rank.0 {
            return Err("connection from a rank that does not dial");
        }
        match self.sockets[peer].get(hello.stream as usize) {
            Some(None) => Ok((peer, hello.stream)),
            Some(Some(_)) => Err("stream already connected"),
            None => Err("stream number out of range"),
        }
    }

    fn add_stream(&mut self, peer: usize, stream: u32, socket: OwnedFd) {
        if self.context.address.is_on_host_of(&self.expected[peer].address) {
            limit_buffer(&socket);
        }
        // Next it is registered with the link's own epoll.
        let _ = epoll::delete(&self.epoll, &socket);
        self.sockets[peer][stream as usize] = Some(socket);
    }

    fn reject(&mut self, why: &'static str) {
        self.context.counters.refused_connections.fetch_add(1, Ordering::Relaxed);
        if self.pending.is_new_reason(why) {
            log::warn!("closed a connection to {}: {why}", self.here());
        }
    }
}

/// Error for a connection that cannot begin.
fn dial_error(peer: Rank, to: SocketAddr, error: std::io::Error) -> Error {
    if limits::is_exhausted(&error) {
        return Error::system("cannot connect over tcp", error);
    }
    if error.kind() == std::io::ErrorKind::AddrNotAvailable && to.is_ipv4() {
        return weft_control::Error::Ports { doing: "connecting over tcp" }.into();
    }
    failed(peer, format!("{to}: {error}"))
}

fn failed(peer: Rank, detail: String) -> Error {
    Error::Connect { peer, provider: ProviderKind::Tcp, detail }
}
