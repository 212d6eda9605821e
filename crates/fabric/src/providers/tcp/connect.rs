//! Connecting to all peers at once, among strangers.
//!
//! Every engine listens from its construction on, so a dialler finds a port whether or not that
//! engine has come here yet, and no order of connecting can deadlock. Of two ranks the higher dials.
//! Both ends send a hello with the token that the other one issued to them alone, over the control plane.
//! Strangers are counted and closed; the port closes as soon as the group is complete.

use super::TcpCounters;
use super::handshake::{HelloReader, dial, send_hello};
use super::wire::{Address, HELLO, Hello, Role, Token, same_token};
use crate::clock;
use crate::error::{Error, Result};
use crate::link::Membership;
use crate::local::WaitLimit;
use crate::strangers::{MAX_STRANGERS, Strangers};
use crate::types::{ProviderKind, Time};
use rustix::event::{Timespec, epoll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{self, SocketFlags};
use std::sync::atomic::Ordering;
use std::time::Duration;
use weft_control::Rank;

/// Pause of a dialler that was turned away before it was answered.
const REDIAL: Duration = Duration::from_millis(50);
/// Pause when this process has no descriptor left for a connection.
const NO_ROOM: Duration = Duration::from_millis(10);

/// Bytes that the kernel may hold of a stream within one host. With more they leave the processor's
/// cache before they are received; there is no wire that they would have to fill.
const SAME_HOST_BUFFER: usize = 512 << 10;

const LISTENER: u64 = u64::MAX;
const DIAL: u64 = 1 << 63;

/// The longest sleep between two checks of a [`WaitLimit`].
const MAX_PARK: Duration = Duration::from_millis(50);

/// What connecting needs of the link.
pub(super) struct Here<'a> {
    pub group: &'a Membership,
    pub address: &'a Address,
    pub listener: &'a OwnedFd,
    pub counters: &'a TcpCounters,
}

/// A peer that is to be connected.
pub(super) struct Expected {
    pub rank: Rank,
    pub address: Address,
    /// The token that this engine issued to the peer, and that the peer shows.
    pub issued: Token,
    /// The token that the peer issued to this engine.
    pub shown: Token,
    /// Connections to it, by the pair's rule.
    pub streams: u32,
}

/// A peer and the sockets of its streams, in their order.
pub(super) type Connected = (Rank, Vec<OwnedFd>);

/// Limits what the kernel holds of a stream to a process of this host.
pub(super) fn limit_buffer(socket: &OwnedFd) {
    // Only makes long writes slower if the kernel refuses.
    let _ = net::sockopt::set_socket_send_buffer_size(socket, SAME_HOST_BUFFER);
}

/// Connects these peers; the error names one that could not be.
pub(super) fn connect(
    here: &Here<'_>,
    expected: Vec<Expected>,
    limit: &mut WaitLimit<'_>,
) -> Result<Vec<Connected>> {
    let mut meeting = Meeting::new(here, expected)?;
    let system = |e| Error::system("cannot wait for connections", e);
    let flags = epoll::EventFlags::IN;
    epoll::add(&meeting.epoll, here.listener, epoll::EventData::new_u64(LISTENER), flags)
        .map_err(system)?;
    let mut events = Vec::with_capacity(64);
    while !meeting.is_complete() {
        (limit.give_up)()?;
        let now = clock::now();
        if now >= limit.deadline {
            return Err(meeting.missing());
        }
        let wait = meeting.redial(now)?.min(limit.deadline).since(now).min(MAX_PARK);
        let timeout = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        events.clear();
        match epoll::wait(
            &meeting.epoll,
            rustix::buffer::spare_capacity(&mut events),
            Some(&timeout),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(system(e)),
        }
        for event in &events {
            match { event.data }.u64() {
                LISTENER => meeting.accept()?,
                data if data & DIAL != 0 => meeting.dial_ready((data & !DIAL) as usize)?,
                data => meeting.stranger_ready(data),
            }
        }
    }
    let ranks = meeting.expected.iter().map(|peer| peer.rank);
    let sockets = meeting.seats.into_iter().map(|seats| seats.into_iter().flatten().collect());
    Ok(ranks.zip(sockets).collect())
}

/// A connection that this engine makes.
struct Dial {
    /// Its place in the list of those expected.
    peer: usize,
    stream: u32,
    state: Dialling,
    /// What ended the attempt before.
    failure: Option<String>,
}

enum Dialling {
    Again(Time),
    Connecting(OwnedFd),
    Asked(OwnedFd, HelloReader),
    Done,
}

/// An accepted connection whose hello has not come.
struct Stranger {
    socket: OwnedFd,
    hello: HelloReader,
}

struct Meeting<'a> {
    here: &'a Here<'a>,
    epoll: OwnedFd,
    expected: Vec<Expected>,
    /// For each of those expected, the sockets of its streams that are connected.
    seats: Vec<Vec<Option<OwnedFd>>>,
    dials: Vec<Dial>,
    strangers: Strangers<Stranger>,
}

impl<'a> Meeting<'a> {
    fn new(here: &'a Here<'a>, expected: Vec<Expected>) -> Result<Self> {
        let (mut dials, mut seats) = (Vec::new(), Vec::new());
        for (peer, Expected { rank, streams, .. }) in expected.iter().enumerate() {
            if here.group.rank > *rank {
                let dial = |stream| {
                    let state = Dialling::Again(Time(0));
                    Dial { peer, stream, state, failure: None }
                };
                dials.extend((0..*streams).map(dial));
            }
            seats.push((0..*streams).map(|_| None).collect());
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| Error::system("cannot create an epoll descriptor", e))?;
        Ok(Meeting { here, epoll, expected, seats, dials, strangers: Strangers::new() })
    }

    fn is_complete(&self) -> bool {
        self.seats.iter().flatten().all(Option::is_some)
    }

    /// The error that names a peer which is not there at the deadline.
    fn missing(&self) -> Error {
        let missing = self.seats.iter().position(|seats| seats.iter().any(Option::is_none));
        let Some(number) = missing else { return Error::Interrupted };
        let peer = &self.expected[number];
        let dial =
            self.dials.iter().find(|d| d.peer == number && !matches!(d.state, Dialling::Done));
        let detail = match dial {
            Some(Dial { failure: Some(why), .. }) => {
                format!("{} did not answer in time; {why}", peer.address.socket)
            }
            Some(_) => format!("{} did not answer in time", peer.address.socket),
            None => format!(
                "it has not called {} in time; can it reach this address?",
                self.here.address.socket
            ),
        };
        failed(peer.rank, detail)
    }

    fn hello(&self, peer: &Expected, role: Role, stream: u32) -> [u8; HELLO] {
        Hello {
            generation: self.here.group.generation,
            role,
            from: self.here.group.rank.0,
            to: peer.rank.0,
            stream,
            token: peer.shown,
        }
        .encode()
    }

    /// Dials what is due, drops strangers that are silent; returns when to do so next.
    fn redial(&mut self, now: Time) -> Result<Time> {
        let mut next = Time::MAX;
        for index in 0..self.dials.len() {
            let Dialling::Again(at) = self.dials[index].state else { continue };
            if at > now {
                next = next.min(at);
                continue;
            }
            let peer = &self.expected[self.dials[index].peer];
            let to = peer.address.socket;
            let socket = dial(to).map_err(|e| failed(peer.rank, format!("{to}: {e}")))?;
            let data = epoll::EventData::new_u64(DIAL | index as u64);
            epoll::add(&self.epoll, &socket, data, epoll::EventFlags::OUT)
                .map_err(|e| Error::system("cannot wait for a connection", e))?;
            self.dials[index].state = Dialling::Connecting(socket);
        }
        while self.strangers.drop_expired(now).is_some() {
            self.refuse("its hello did not come in time");
        }
        Ok(self.strangers.next_expiry().map_or(next, |expires| expires.min(next)))
    }

    fn dial_ready(&mut self, index: usize) -> Result<()> {
        let Some(dial) = self.dials.get_mut(index) else { return Ok(()) };
        let (number, stream) = (dial.peer, dial.stream);
        let state = std::mem::replace(&mut dial.state, Dialling::Done);
        let peer = &self.expected[number];
        let state = match state {
            Dialling::Connecting(socket) => {
                let to = peer.address.socket;
                let refused = |e: Errno| failed(peer.rank, format!("{to}: {e}"));
                net::sockopt::socket_error(&socket).map_err(refused)?.map_err(refused)?;
                let hello = self.hello(peer, Role::Dialler, stream);
                if send_hello(&socket, &hello) {
                    let data = epoll::EventData::new_u64(DIAL | index as u64);
                    epoll::modify(&self.epoll, &socket, data, epoll::EventFlags::IN)
                        .map_err(|e| Error::system("cannot wait for a connection", e))?;
                    Dialling::Asked(socket, HelloReader::default())
                } else {
                    Dialling::Again(clock::now().after(REDIAL))
                }
            }
            Dialling::Asked(socket, mut answer) => match answer.read(&socket) {
                Ok(None) => Dialling::Asked(socket, answer),
                Ok(Some(bytes)) => {
                    let rank = peer.rank;
                    self.check_answer(&bytes, rank, stream).map_err(|why| {
                        let to = self.expected[number].address.socket;
                        failed(rank, format!("what answers at {to} is not its engine: {why}"))
                    })?;
                    self.seat(number, stream, socket);
                    Dialling::Done
                }
                Err(why) => {
                    self.dials[index].failure = Some(why.into());
                    Dialling::Again(clock::now().after(REDIAL))
                }
            },
            state => state,
        };
        self.dials[index].state = state;
        Ok(())
    }

    fn check_answer(
        &self,
        bytes: &[u8; HELLO],
        rank: Rank,
        stream: u32,
    ) -> Result<(), &'static str> {
        let (hello, _) = self.check_hello(bytes, Role::Acceptor)?;
        if hello.from != rank.0 || hello.stream != stream {
            return Err("it answers for another rank or stream");
        }
        Ok(())
    }

    /// A hello that is right, and the place of its sender among those expected.
    fn check_hello(&self, bytes: &[u8; HELLO], role: Role) -> Result<(Hello, usize), &'static str> {
        let hello = Hello::decode(bytes)?;
        let peer = self.expected.iter().position(|peer| peer.rank.0 == hello.from);
        let peer = peer.ok_or("its rank is not expected")?;
        if !same_token(&hello.token, &self.expected[peer].issued) {
            return Err("it does not show the token that this engine issued to its rank");
        }
        if hello.generation != self.here.group.generation {
            return Err("it is of another generation");
        }
        if hello.role != role || hello.to != self.here.group.rank.0 {
            return Err("it is meant for another rank");
        }
        Ok((hello, peer))
    }

    fn accept(&mut self) -> Result<()> {
        for _ in 0..MAX_STRANGERS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match net::accept_with(self.here.listener, flags) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => break,
                // What the connection died of, not the listener.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => continue,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    // The oldest stranger gives up its descriptor to the next connection.
                    if self.strangers.drop_oldest().is_none() {
                        std::thread::sleep(NO_ROOM);
                    }
                    self.refuse("there were no descriptors left");
                    break;
                }
                Err(e) => return Err(Error::system("cannot accept connections", e)),
            };
            let stranger = Stranger { socket, hello: HelloReader::default() };
            let (id, dropped) = self.strangers.add(stranger, clock::now());
            if dropped.is_some() {
                self.refuse("too many connections had sent no hello");
            }
            let data = epoll::EventData::new_u64(id);
            if let Some(Stranger { socket, .. }) = self.strangers.get_mut(id) {
                epoll::add(&self.epoll, socket, data, epoll::EventFlags::IN)
                    .map_err(|e| Error::system("cannot wait for a connection", e))?;
            }
            // The hello of a peer has come already.
            self.stranger_ready(id);
        }
        Ok(())
    }

    fn stranger_ready(&mut self, id: u64) {
        let Some(stranger) = self.strangers.get_mut(id) else { return };
        let outcome = match stranger.hello.read(&stranger.socket) {
            Ok(None) => return,
            Ok(Some(bytes)) => self.recognise(&bytes),
            Err(why) => Err(why),
        };
        let Some(stranger) = self.strangers.take(id) else { return };
        match outcome {
            Ok((peer, stream)) => {
                let hello = self.hello(&self.expected[peer], Role::Acceptor, stream);
                if send_hello(&stranger.socket, &hello) {
                    self.seat(peer, stream, stranger.socket);
                }
            }
            Err(why) => self.refuse(why),
        }
    }

    /// Which peer and stream a hello is from.
    fn recognise(&self, bytes: &[u8; HELLO]) -> Result<(usize, u32), &'static str> {
        let (hello, peer) = self.check_hello(bytes, Role::Dialler)?;
        if hello.from <= self.here.group.rank.0 {
            return Err("its rank does not dial");
        }
        match self.seats[peer].get(hello.stream as usize) {
            Some(None) => Ok((peer, hello.stream)),
            Some(Some(_)) => Err("its stream is connected already"),
            None => Err("there is no stream of its number"),
        }
    }

    fn seat(&mut self, peer: usize, stream: u32, socket: OwnedFd) {
        if self.here.address.is_on_host_of(&self.expected[peer].address) {
            limit_buffer(&socket);
        }
        // It is registered with the link's own epoll next.
        let _ = epoll::delete(&self.epoll, &socket);
        self.seats[peer][stream as usize] = Some(socket);
    }

    fn refuse(&mut self, why: &'static str) {
        self.here.counters.refused_connections.fetch_add(1, Ordering::Relaxed);
        if self.strangers.is_new_reason(why) {
            log::warn!("closed a connection to {}: {why}", self.here.address.socket);
        }
    }
}

fn failed(peer: Rank, detail: String) -> Error {
    Error::Connect { peer, provider: ProviderKind::Tcp, detail }
}
