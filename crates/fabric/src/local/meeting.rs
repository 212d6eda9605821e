//! The meeting of ranks: one socket to each peer, both ends proved, one introduction each way.
//!
//! An introduction is a message with descriptors: a provider's is its lane table, that of an
//! [`super::Exchange`] one region. The lower rank of a pair dials, the higher accepts; one loop serves
//! all pairs at once, so no order can deadlock. A stranger that finds the socket is dropped.

use super::{Address, Link, Message, Token, WaitLimit, refused, socket, wait};
use crate::error::{Error, Result};
use crate::types::{Generation, ProviderKind};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::io;
use std::time::Duration;
use weft_control::Rank;

/// Sleep before dialling again a peer whose backlog is full: no event announces room in it.
const REDIAL: Duration = Duration::from_millis(1);
/// Accepted connections that have not proved a rank, at a time.
const MAX_STRANGERS: usize = 64;

/// This rank's part in a meeting.
pub(super) struct Party<'a> {
    /// The provider that errors name.
    pub kind: ProviderKind,
    pub rank: Rank,
    pub generation: Generation,
    pub token: Token,
    pub listener: &'a OwnedFd,
    /// A message for each peer that has proved its rank.
    pub introduction: &'a dyn Fn() -> io::Result<Message>,
}

/// A peer that was met.
pub(super) struct MetPeer {
    pub rank: Rank,
    pub link: Link,
    pub introduction: Message,
}

/// A peer on the way to being met.
struct Pending {
    rank: Rank,
    address: Address,
    link: Option<Link>,
    is_proved: bool,
    introduction: Option<Message>,
}

/// The state of the loop.
pub(super) struct Meeting<'a> {
    party: Party<'a>,
    peers: Vec<Pending>,
    /// Accepted connections that have not proved a rank.
    strangers: Vec<Link>,
}

impl Party<'_> {
    fn hello(&self) -> Message {
        Message::Hello { from: self.rank, generation: self.generation, token: self.token }
    }
}

impl Pending {
    /// Whether a hello proves that its sender is this peer.
    fn is_proved_by(&self, party: &Party<'_>, hello: &Message) -> bool {
        let expected = (self.rank, party.generation, self.address.token);
        matches!(hello, &Message::Hello { from, generation, token }
            if (from, generation, token) == expected)
    }

    fn is_dialled_by(&self, party: &Party<'_>) -> bool {
        party.rank < self.rank
    }

    fn is_met(&self) -> bool {
        self.introduction.is_some() && self.link.as_ref().is_some_and(|link| !link.has_unsent())
    }

    /// Goes on as far as it goes without waiting.
    fn step(&mut self, party: &Party<'_>) -> io::Result<()> {
        if self.link.is_none() && self.is_dialled_by(party) {
            let Some(socket) = socket::dial(&self.address.name)? else { return Ok(()) };
            let mut link = Link::new(socket);
            link.send(party.hello())?;
            self.link = Some(link);
        }
        let Some(link) = &mut self.link else { return Ok(()) };
        link.flush()?;
        while self.introduction.is_none() {
            let Some(message) = self.link.as_mut().map_or(Ok(None), Link::receive)? else { break };
            self.receive(party, message)?;
        }
        Ok(())
    }

    fn receive(&mut self, party: &Party<'_>, message: Message) -> io::Result<()> {
        let is_hello = matches!(message, Message::Hello { .. });
        if is_hello == self.is_proved {
            return Err(wrong_order());
        }
        if !is_hello {
            self.introduction = Some(message);
            return Ok(());
        }
        if !self.is_proved_by(party, &message) {
            return Err(io::Error::other("another process answers in its place"));
        }
        self.is_proved = true;
        self.link.as_mut().map_or(Ok(()), |link| link.send((party.introduction)()?))
    }

    /// Takes the connection of a stranger that has proved to be this peer.
    fn seat(&mut self, party: &Party<'_>, mut link: Link) -> io::Result<()> {
        link.send(party.hello())?;
        link.send((party.introduction)()?)?;
        (self.link, self.is_proved) = (Some(link), true);
        Ok(())
    }
}

impl<'a> Meeting<'a> {
    /// A meeting with `peers`, by rank and encoded address.
    pub fn new(party: Party<'a>, peers: &[(Rank, &[u8])]) -> Result<Meeting<'a>> {
        let pending = |&(rank, bytes): &(Rank, &[u8])| {
            let address = Address::decode(bytes).ok_or_else(|| Error::Malformed {
                peer: rank,
                what: "an shm address",
                detail: format!("{} bytes", bytes.len()),
            })?;
            Ok(Pending { rank, address, link: None, is_proved: false, introduction: None })
        };
        let peers = peers.iter().map(pending).collect::<Result<_>>()?;
        Ok(Meeting { party, peers, strangers: Vec::new() })
    }

    /// Meets all peers, or fails naming the first that is missing.
    pub fn run(mut self, limit: &mut WaitLimit<'_>) -> Result<Vec<MetPeer>> {
        while !self.step()? {
            match limit.park()? {
                Some(timeout) => self.sleep(timeout),
                None => return Err(self.late()),
            }
        }
        let met =
            self.peers.into_iter().filter_map(|Pending { rank, link, introduction, .. }| {
                Some(MetPeer { rank, link: link?, introduction: introduction? })
            });
        Ok(met.collect())
    }

    /// Goes on with all peers as far as it goes without waiting; returns whether all are met.
    fn step(&mut self) -> Result<bool> {
        self.accept();
        self.receive_hellos()?;
        let Meeting { party, peers, .. } = self;
        for peer in peers.iter_mut() {
            peer.step(party).map_err(|error| refused(party.kind, peer.rank, error))?;
        }
        Ok(peers.iter().all(Pending::is_met))
    }

    fn accept(&mut self) {
        while self.strangers.len() < MAX_STRANGERS {
            match socket::accept(self.party.listener) {
                Ok(socket) if socket::is_of_this_user(&socket) => {
                    self.strangers.push(Link::new(socket));
                }
                Ok(_) => log::warn!("dropped a connection from a process of another user"),
                Err(Errno::INTR) => {}
                // No connection waits, or no descriptor is left for it: the deadline ends that.
                Err(_) => return,
            }
        }
    }

    /// A stranger whose first message proves a peer's token becomes that peer.
    fn receive_hellos(&mut self) -> Result<()> {
        let mut index = 0;
        while index < self.strangers.len() {
            let Some(hello) = self.strangers[index].receive().transpose() else {
                index += 1;
                continue;
            };
            let link = self.strangers.swap_remove(index);
            let Meeting { party, peers, .. } = self;
            let peer = hello.ok().and_then(|hello| {
                let mut expected =
                    peers.iter_mut().filter(|p| p.link.is_none() && !p.is_dialled_by(party));
                expected.find(|peer| peer.is_proved_by(party, &hello))
            });
            match peer {
                Some(peer) => {
                    let rank = peer.rank;
                    peer.seat(party, link).map_err(|e| refused(party.kind, rank, e))?;
                }
                None => log::warn!("dropped a connection that did not prove which rank it is"),
            }
        }
        Ok(())
    }

    fn sleep(&self, timeout: Duration) {
        let undialled = |peer: &Pending| peer.link.is_none() && peer.is_dialled_by(&self.party);
        let redials = self.peers.iter().any(undialled);
        let mut polled = vec![PollFd::new(self.party.listener, PollFlags::IN)];
        polled.extend(self.strangers.iter().map(|link| link.interest(true)));
        // A peer that is met may close its link at any time from now on; that is no event here.
        let links =
            self.peers.iter().filter_map(|p| Some((p.link.as_ref()?, p.introduction.is_none())));
        polled.extend(links.map(|(link, read)| link.interest(read)));
        wait::sleep(&mut polled, if redials { REDIAL } else { timeout });
    }

    /// The error that names a peer which is missing at the deadline.
    fn late(&self) -> Error {
        let mut missing = self.peers.iter().filter(|p| p.introduction.is_none()).map(|p| p.rank);
        let first = missing.next().unwrap_or(self.party.rank);
        let detail =
            format!("it did not answer before the deadline, nor did {} others", missing.count());
        refused(self.party.kind, first, detail)
    }
}

/// A message that this state of the protocol excludes.
pub(super) fn wrong_order() -> io::Error {
    io::Error::other("it sent messages in the wrong order")
}
