//! The meeting of ranks: one socket to each peer, both ends proved, one introduction each way.
//!
//! An introduction is a message with descriptors: a provider's is its lane table, that of an
//! [`super::Exchange`] one region. The lower rank of a pair dials, the higher accepts; one loop serves
//! all pairs at once, so no order can deadlock. Strangers that find the socket are bounded in number and
//! time ([`crate::strangers`]); a peer that was closed among them dials again.

use super::{Address, Link, Message, Token, WaitLimit, refused, socket, wait};
use crate::clock;
use crate::error::{Error, Result};
use crate::strangers::{MAX_STRANGERS, Strangers};
use crate::types::{Generation, ProviderKind, Time};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::io;
use std::time::Duration;
use weft_control::Rank;

/// Pause before dialling again a peer whose backlog is full: no event announces room in it.
const BACKLOG_FULL: Duration = Duration::from_millis(1);
/// Pause before dialling again a peer that closed the connection before its hello.
const REDIAL: Duration = Duration::from_millis(50);
/// Pause when this process has no descriptor left for a connection.
const NO_ROOM: Duration = Duration::from_millis(10);

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
    /// When it is dialled next.
    dial_at: Time,
    /// The end of the attempt before.
    failure: Option<io::Error>,
}

/// The state of the loop.
pub(super) struct Meeting<'a> {
    party: Party<'a>,
    peers: Vec<Pending>,
    /// Accepted connections that have not proved a rank.
    strangers: Strangers<Link>,
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
    fn step(&mut self, party: &Party<'_>, now: Time) -> io::Result<()> {
        if self.link.is_none() && self.is_dialled_by(party) && self.dial_at <= now {
            let Some(socket) = socket::dial(&self.address.name)? else {
                self.dial_at = now.after(BACKLOG_FULL);
                return Ok(());
            };
            self.link = Some(Link::new(socket));
            let sent = self.link.as_mut().map_or(Ok(()), |link| link.send(party.hello()));
            return self.dial_again_if_closed(sent, party, now);
        }
        let received = self.receive_all(party);
        self.dial_again_if_closed(received, party, now)
    }

    /// A peer that had no room for one more stranger closed the connection: it is dialled again.
    fn dial_again_if_closed(
        &mut self,
        result: io::Result<()>,
        party: &Party<'_>,
        now: Time,
    ) -> io::Result<()> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match result {
            Err(error)
                if !self.is_proved
                    && self.is_dialled_by(party)
                    && matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof) =>
            {
                (self.link, self.failure) = (None, Some(error));
                self.dial_at = now.after(REDIAL);
                Ok(())
            }
            result => result,
        }
    }

    fn receive_all(&mut self, party: &Party<'_>) -> io::Result<()> {
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
            Ok(Pending {
                rank,
                address,
                link: None,
                is_proved: false,
                introduction: None,
                dial_at: Time(0),
                failure: None,
            })
        };
        let peers = peers.iter().map(pending).collect::<Result<_>>()?;
        Ok(Meeting { party, peers, strangers: Strangers::new() })
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
        let now = clock::now();
        self.accept(now)?;
        self.receive_hellos()?;
        while self.strangers.drop_expired(now).is_some() {
            self.refuse("its hello did not come in time");
        }
        let Meeting { party, peers, .. } = self;
        for peer in peers.iter_mut() {
            peer.step(party, now).map_err(|error| refused(party.kind, peer.rank, error))?;
        }
        Ok(peers.iter().all(Pending::is_met))
    }

    fn accept(&mut self, now: Time) -> Result<()> {
        for _ in 0..MAX_STRANGERS {
            let socket = match socket::accept(self.party.listener) {
                Ok(socket) => socket,
                // The error of one connection, not of the listener.
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    // The oldest stranger gives up its descriptor to the next connection.
                    if self.strangers.drop_oldest().is_none() {
                        std::thread::sleep(NO_ROOM);
                    }
                    self.refuse("there were no descriptors left");
                    break;
                }
                // No connection waits.
                Err(_) => break,
            };
            if !socket::is_of_this_user(&socket) {
                self.refuse("it is from a process of another user");
                continue;
            }
            let (id, dropped) = self.strangers.add(Link::new(socket), now);
            if dropped.is_some() {
                self.refuse("too many connections had sent no hello");
            }
            // The hello of a peer has come already, or comes soon.
            self.receive_hello(id)?;
        }
        Ok(())
    }

    fn receive_hellos(&mut self) -> Result<()> {
        let ids: Vec<u64> = self.strangers.iter().map(|(id, _)| id).collect();
        ids.into_iter().try_for_each(|id| self.receive_hello(id))
    }

    /// A stranger whose first message proves a peer's token becomes that peer.
    fn receive_hello(&mut self, id: u64) -> Result<()> {
        let message = self.strangers.get_mut(id).map_or(Ok(None), Link::receive).transpose();
        let Some(message) = message else { return Ok(()) };
        let Some(link) = self.strangers.take(id) else { return Ok(()) };
        let Meeting { party, peers, .. } = self;
        let peer = message.ok().and_then(|hello| {
            let expected = |p: &Pending| p.link.is_none() && !p.is_dialled_by(party);
            peers.iter_mut().find(|p| expected(p) && p.is_proved_by(party, &hello))
        });
        match peer {
            Some(peer) => {
                let rank = peer.rank;
                peer.seat(party, link).map_err(|e| refused(party.kind, rank, e))?;
            }
            None => self.refuse("it did not prove a rank"),
        }
        Ok(())
    }

    fn refuse(&mut self, reason: &'static str) {
        if self.strangers.is_new_reason(reason) {
            log::warn!("closed a connection to the socket of {}: {reason}", self.party.rank);
        }
    }

    /// Sleeps until a connection or a message comes, or a peer is to be dialled; at most `timeout`.
    fn sleep(&self, timeout: Duration) {
        let undialled = |p: &&Pending| p.link.is_none() && p.is_dialled_by(&self.party);
        let next = self.peers.iter().filter(undialled).map(|peer| peer.dial_at).min();
        let until_next = next.map_or(timeout, |at| at.since(clock::now()));
        let mut polled = vec![PollFd::new(self.party.listener, PollFlags::IN)];
        polled.extend(self.strangers.iter().map(|(_, link)| link.interest(true)));
        // A peer that is met may close its link at any time from now on; that is no event here.
        let links =
            self.peers.iter().filter_map(|p| Some((p.link.as_ref()?, p.introduction.is_none())));
        polled.extend(links.map(|(link, read)| link.interest(read)));
        wait::sleep(&mut polled, until_next.min(timeout));
    }

    /// The error that names a peer which is missing at the deadline.
    fn late(&self) -> Error {
        let mut missing = self.peers.iter().filter(|peer| peer.introduction.is_none());
        let first = missing.next();
        let mut detail =
            format!("it did not answer before the deadline, nor did {} others", missing.count());
        if let Some(failure) = first.and_then(|peer| peer.failure.as_ref()) {
            detail = format!("{detail}; at the last attempt {failure}");
        }
        let first = first.map_or(self.party.rank, |peer| peer.rank);
        refused(self.party.kind, first, detail)
    }
}

/// A message that this state of the protocol excludes.
pub(super) fn wrong_order() -> io::Error {
    io::Error::other("it sent messages in the wrong order")
}
