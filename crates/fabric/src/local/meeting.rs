//! The meeting of ranks: one socket to each peer, both ends proved, one introduction each way.
//!
//! An introduction is a message with descriptors: a provider's is its lane table, that of an
//! [`super::Exchange`] one region. The lower rank of a pair dials, the higher accepts; one loop serves
//! all pairs at once, so no order can deadlock. Strangers that find the socket are bounded in number and
//! time ([`crate::strangers`]); a peer that was closed among them dials again.

use super::pending::{Party, Pending};
use super::{Link, Message, WaitLimit, refused, socket, wait};
use crate::clock;
use crate::error::{Error, Result};
use crate::strangers::{MAX_STRANGERS, Strangers};
use crate::types::Time;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use std::time::Duration;
use weft_control::Rank;

/// Pause when this process has no descriptor left for a connection.
const NO_ROOM: Duration = Duration::from_millis(10);

/// A peer that was met.
pub(super) struct MetPeer {
    pub rank: Rank,
    pub link: Link,
    pub introduction: Message,
}

/// The state of the loop.
pub(super) struct Meeting<'a> {
    party: Party<'a>,
    peers: Vec<Pending>,
    /// Accepted connections that have not proved a rank.
    strangers: Strangers<Link>,
}

impl<'a> Meeting<'a> {
    /// A meeting with `peers`, by rank and encoded address.
    pub fn new(party: Party<'a>, peers: &[(Rank, &[u8])]) -> Result<Meeting<'a>> {
        let peers = peers.iter().map(|&(rank, address)| Pending::new(rank, address));
        let peers = peers.collect::<Result<_>>()?;
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
