//! Meeting the peers: one socket to each, both ends proved, one message with descriptors each way.
//!
//! The provider's message is its lane table; [`super::exchange`] has one of its own.
//! The lower rank of a pair connects, the higher accepts; one loop serves all pairs at once, so no
//! order can deadlock. A stranger who finds the socket is dropped and disturbs nobody.

use super::address::{Address, Token};
use super::link::{Link, Message, sleep};
use super::{Peer, ShmProvider};
use crate::clock;
use crate::error::{Error, Result};
use crate::lane_table::{LaneTable, LaneWords};
use crate::memory::Memory;
use crate::provider::Group;
use crate::types::{Generation, ProviderKind, Time};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::io;
use std::time::Duration;
use weft_control::Rank;

/// How long to sleep when a peer's backlog is full: there is nothing to poll for then.
const RETRY: Duration = Duration::from_millis(1);
/// The longest sleep between two looks at the clock.
pub(super) const NAP: Duration = Duration::from_millis(50);
/// Strangers that may be connected and silent at a time.
const MAX_STRANGERS: usize = 64;

/// A socket that listens under this name.
pub(super) fn listen(name: &[u8]) -> Result<OwnedFd> {
    let unusable = |e: Errno| Error::system("cannot listen on an abstract Unix socket", e);
    let socket = new_socket().map_err(unusable)?;
    let address = SocketAddrUnix::new_abstract_name(name).map_err(unusable)?;
    rustix::net::bind(&socket, &address).map_err(unusable)?;
    rustix::net::listen(&socket, 4096).map_err(unusable)?;
    Ok(socket)
}

fn new_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// A peer on the way to being connected.
struct Pending {
    rank: Rank,
    address: Address,
    link: Option<Link>,
    proved: bool,
    given: Option<Message>,
}

/// A peer that was met: its socket, and what it gave.
pub(super) struct Met {
    pub rank: Rank,
    pub link: Link,
    pub given: Message,
}

/// Who meets, and with what.
pub(super) struct Meeting<'a> {
    me: Rank,
    generation: Generation,
    token: Token,
    listener: &'a OwnedFd,
    /// What every peer is given once it has proved itself.
    give: &'a dyn Fn() -> io::Result<Message>,
    peers: Vec<Pending>,
    /// In whose name errors are reported.
    kind: ProviderKind,
    /// Accepted and not yet proved to be anybody.
    strangers: Vec<Link>,
}

impl ShmProvider {
    /// Connects all peers of the group, or fails naming the first that is missing.
    pub(super) fn meet(&mut self, group: &Group<'_>) -> Result<()> {
        let listener = self.listener.take().ok_or_else(|| Error::Provider {
            provider: self.kind,
            detail: "it was connected before; make a new one for each group".into(),
        })?;
        let give = || table(group.lanes);
        let (token, generation, kind) = (self.address.token, group.generation, self.kind);
        let meeting =
            Meeting::new(kind, group.rank, generation, token, &listener, &give, group.peers)?;
        self.peers.resize_with(group.size as usize, || None);
        for Met { rank, link, given } in meeting.run(group.deadline)? {
            let (words, wake) = lanes_of(given).map_err(|e| refused(kind, rank, e.to_string()))?;
            if let Some(slot) = self.peers.get_mut(rank.index()) {
                *slot = Some(Peer::new(link, words, wake, generation));
            }
        }
        Ok(())
    }
}

/// The lanes of a peer, out of the message that it gave.
fn lanes_of(given: Message) -> io::Result<(LaneWords, OwnedFd)> {
    let Message::Table { capacity, memory, wake } = given else { return Err(wrong_order()) };
    let length = LaneWords::bytes_for(capacity as usize);
    let memory = Memory::map(memory, length).map_err(io::Error::other)?;
    let words = LaneWords::new(memory.into(), capacity as usize);
    Ok((words.ok_or_else(|| io::Error::other("its lane table is no table"))?, wake))
}

fn wrong_order() -> io::Error {
    io::Error::other("it sent messages in the wrong order")
}

impl<'a> Meeting<'a> {
    /// A meeting with `peers`, by rank and address, in the name of `kind`.
    pub fn new(
        kind: ProviderKind,
        me: Rank,
        generation: Generation,
        token: Token,
        listener: &'a OwnedFd,
        give: &'a dyn Fn() -> io::Result<Message>,
        peers: &[(Rank, &[u8])],
    ) -> Result<Meeting<'a>> {
        let mut pending = Vec::new();
        for &(rank, address) in peers {
            let address = Address::decode(address).ok_or_else(|| Error::Malformed {
                peer: rank,
                what: "an shm address",
                detail: format!("{} bytes", address.len()),
            })?;
            pending.push(Pending { rank, address, link: None, proved: false, given: None });
        }
        let strangers = Vec::new();
        Ok(Meeting { me, generation, token, listener, give, peers: pending, kind, strangers })
    }

    /// Meets all of them, or fails naming the first that is missing.
    pub fn run(mut self, deadline: Time) -> Result<Vec<Met>> {
        while !self.step()? {
            let now = clock::now();
            if now >= deadline {
                return Err(self.late());
            }
            self.wait(deadline.since(now).min(NAP));
        }
        let met = self.peers.into_iter().filter_map(|Pending { rank, link, given, .. }| {
            Some(Met { rank, link: link?, given: given? })
        });
        Ok(met.collect())
    }

    /// Goes on with everybody as far as it goes without waiting; whether all are connected.
    fn step(&mut self) -> Result<bool> {
        self.accept();
        self.hear_strangers()?;
        let mut all = true;
        for index in 0..self.peers.len() {
            let rank = self.peers[index].rank;
            if let Err(error) = self.step_peer(index) {
                return Err(refused(self.kind, rank, error.to_string()));
            }
            let peer = &self.peers[index];
            all &= peer.given.is_some() && peer.link.as_ref().is_some_and(|l| !l.has_unsent());
        }
        Ok(all)
    }

    fn step_peer(&mut self, index: usize) -> io::Result<()> {
        let peer = &mut self.peers[index];
        if peer.link.is_none() && self.me < peer.rank {
            let Some(mut link) = call(&peer.address.name)? else { return Ok(()) };
            link.send(hello(self.me, self.generation, self.token))?;
            peer.link = Some(link);
        }
        let Some(link) = &mut peer.link else { return Ok(()) };
        link.flush()?;
        while peer.given.is_none() {
            match link.receive()? {
                None => break,
                Some(Message::Hello { from, generation, token }) if !peer.proved => {
                    if (from, generation, token) != (peer.rank, self.generation, peer.address.token)
                    {
                        return Err(io::Error::other("another process answers in its place"));
                    }
                    peer.proved = true;
                    link.send((self.give)()?)?;
                }
                Some(Message::Hello { .. }) => return Err(wrong_order()),
                Some(given) if peer.proved => peer.given = Some(given),
                Some(_) => return Err(wrong_order()),
            }
        }
        Ok(())
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        while self.strangers.len() < MAX_STRANGERS {
            match rustix::net::accept_with(self.listener, flags) {
                Ok(socket) if is_ours(&socket) => self.strangers.push(Link::new(socket)),
                Ok(_) => log::warn!("dropped a connection from a process of another user"),
                Err(Errno::INTR) => {}
                // Nobody there, or no descriptor left to take them with: the deadline ends that.
                Err(_) => return,
            }
        }
    }

    /// A stranger whose first message proves a peer's token becomes that peer.
    fn hear_strangers(&mut self) -> Result<()> {
        let mut index = 0;
        while index < self.strangers.len() {
            let Some(heard) = self.strangers[index].receive().transpose() else {
                index += 1;
                continue;
            };
            let link = self.strangers.swap_remove(index);
            let known = match heard {
                Ok(Message::Hello { from, generation, token }) => self.peers.iter_mut().find(|p| {
                    (p.rank, p.address.token, self.generation) == (from, token, generation)
                        && p.link.is_none()
                        && p.rank < self.me
                }),
                _ => None,
            };
            match known {
                Some(peer) => {
                    (peer.link, peer.proved) = (Some(link), true);
                    let answer = hello(self.me, self.generation, self.token);
                    let link = peer.link.as_mut().expect("was just put there");
                    let sent = link.send(answer).and_then(|()| link.send((self.give)()?));
                    sent.map_err(|error| refused(self.kind, peer.rank, error.to_string()))?;
                }
                None => log::warn!("dropped a connection that did not prove which rank it is"),
            }
        }
        Ok(())
    }

    fn wait(&self, timeout: Duration) {
        let calling = self.peers.iter().any(|peer| peer.link.is_none() && self.me < peer.rank);
        let mut polled = vec![PollFd::new(self.listener, PollFlags::IN)];
        polled.extend(self.strangers.iter().map(|link| link.interest(true)));
        // A peer that is connected may close at any time from now on; that is not waited for.
        let links = self.peers.iter().filter_map(|p| Some((p.link.as_ref()?, p.given.is_none())));
        polled.extend(links.map(|(link, read)| link.interest(read)));
        sleep(&mut polled, if calling { RETRY } else { timeout });
    }

    fn late(&self) -> Error {
        let missing: Vec<Rank> =
            self.peers.iter().filter(|p| p.given.is_none()).map(|p| p.rank).collect();
        let detail = format!(
            "it did not answer before the deadline, nor did {} others",
            missing.len().saturating_sub(1)
        );
        refused(self.kind, missing.first().copied().unwrap_or(self.me), detail)
    }
}

pub(super) fn refused(provider: ProviderKind, peer: Rank, detail: String) -> Error {
    Error::Connect { peer, provider, detail }
}

fn hello(from: Rank, generation: Generation, token: Token) -> Message {
    Message::Hello { from, generation, token }
}

fn table(lanes: &LaneTable) -> io::Result<Message> {
    let memory = lanes.words().memory().descriptor();
    let memory = memory.ok_or_else(|| io::Error::other("the lane table cannot be shared"))?;
    Ok(Message::Table {
        capacity: lanes.words().capacity() as u32,
        memory: memory.try_clone_to_owned()?,
        wake: lanes.descriptor().try_clone_to_owned()?,
    })
}

/// A connection to the socket of this name, or `None` if its backlog is full just now.
fn call(name: &[u8]) -> io::Result<Option<Link>> {
    let address = SocketAddrUnix::new_abstract_name(name)?;
    let socket = new_socket()?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) if is_ours(&socket) => Ok(Some(Link::new(socket))),
        Ok(()) => Err(io::Error::other("its socket belongs to another user")),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(Errno::CONNREFUSED) => Err(io::Error::other(
            "nobody listens on its socket: the process is gone, or it runs in another network \
             namespace (another container, for one)",
        )),
        Err(error) => Err(error.into()),
    }
}

fn is_ours(socket: impl AsFd) -> bool {
    sockopt::socket_peercred(socket).is_ok_and(|cred| cred.uid == rustix::process::geteuid())
}
