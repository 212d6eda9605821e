//! Rendezvous of the ranks of one host: one socket to each peer, both ends authenticated, one introduction
//! each way.
//!
//! An introduction is a message with descriptors: a provider's is its lane table, that of a
//! [`super::DescriptorExchange`] one region. The lower rank of a pair dials, the higher accepts; one loop
//! serves all pairs at once, so no order can deadlock. Unproven connections are bounded in number and time
//! ([`crate::unproven`]); a peer that was evicted among them dials again.

use super::pending_peer::{PendingPeer, RendezvousEnd};
use super::{DescriptorSocket, LocalMessage, WaitLimit, connect_error, socket, wait};
use crate::clock;
use crate::error::{Error, Result};
use crate::types::Time;
use crate::unproven::{MAX_UNPROVEN, UnprovenConnections};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use std::time::Duration;
use weft_control::Rank;

/// Pause if this process has no descriptor left for a connection.
const DESCRIPTOR_PAUSE: Duration = Duration::from_millis(10);

/// A connected peer.
pub(super) struct ConnectedPeer {
    pub rank: Rank,
    pub link: DescriptorSocket,
    pub introduction: LocalMessage,
}

/// State of the rendezvous.
pub(super) struct Rendezvous<'a> {
    own: RendezvousEnd<'a>,
    peers: Vec<PendingPeer>,
    /// Accepted connections that have not proved a rank.
    unproven: UnprovenConnections<DescriptorSocket>,
}

impl<'a> Rendezvous<'a> {
    /// A rendezvous with `peers`, by rank and encoded address.
    pub fn new(own: RendezvousEnd<'a>, peers: &[(Rank, &[u8])]) -> Result<Rendezvous<'a>> {
        let peers = peers.iter().map(|&(rank, address)| PendingPeer::new(rank, address));
        let peers = peers.collect::<Result<_>>()?;
        Ok(Rendezvous { own, peers, unproven: UnprovenConnections::new() })
    }

    /// Connects all peers, or returns an error that names the first missing one.
    pub fn run(mut self, limit: &mut WaitLimit<'_>) -> Result<Vec<ConnectedPeer>> {
        while !self.step()? {
            match limit.park()? {
                Some(timeout) => self.sleep(timeout),
                None => return Err(self.deadline_error()),
            }
        }
        let met = self.peers.into_iter().filter_map(
            |PendingPeer { rank, link, introduction, .. }| {
                Some(ConnectedPeer { rank, link: link?, introduction: introduction? })
            },
        );
        Ok(met.collect())
    }

    /// Advances all connections without waiting; returns true once all peers are connected.
    fn step(&mut self) -> Result<bool> {
        let now = clock::now();
        self.accept(now)?;
        self.receive_hellos()?;
        while self.unproven.drop_expired(now).is_some() {
            self.refuse("no hello in time");
        }
        let Rendezvous { own, peers, .. } = self;
        for peer in peers.iter_mut() {
            peer.step(own, now).map_err(|error| connect_error(own.kind, peer.rank, error))?;
        }
        Ok(peers.iter().all(PendingPeer::is_connected))
    }

    fn accept(&mut self, now: Time) -> Result<()> {
        for _ in 0..MAX_UNPROVEN {
            let socket = match socket::accept(self.own.listener) {
                Ok(socket) => socket,
                // The error of one connection, not of the listener.
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    // The oldest unproven connection frees its descriptor for the next one.
                    if self.unproven.drop_oldest().is_none() {
                        std::thread::sleep(DESCRIPTOR_PAUSE);
                    }
                    self.refuse("no descriptors left");
                    break;
                }
                // No connection waits.
                Err(_) => break,
            };
            if !socket::is_of_this_user(&socket) {
                self.refuse("it is from a process of another user");
                continue;
            }
            let (id, dropped) = self.unproven.add(DescriptorSocket::new(socket), now);
            if dropped.is_some() {
                self.refuse("too many connections without a hello");
            }
            // The hello of a peer may have arrived already.
            self.receive_hello(id)?;
        }
        Ok(())
    }

    fn receive_hellos(&mut self) -> Result<()> {
        let ids: Vec<u64> = self.unproven.iter().map(|(id, _)| id).collect();
        ids.into_iter().try_for_each(|id| self.receive_hello(id))
    }

    /// Assigns a connection whose first message proves a peer's token to that peer.
    fn receive_hello(&mut self, id: u64) -> Result<()> {
        let message =
            self.unproven.get_mut(id).map_or(Ok(None), DescriptorSocket::receive).transpose();
        let Some(message) = message else { return Ok(()) };
        let Some(link) = self.unproven.take(id) else { return Ok(()) };
        let Rendezvous { own, peers, .. } = self;
        let peer = message.ok().and_then(|hello| {
            let expected = |p: &PendingPeer| p.link.is_none() && !p.is_dialled_by(own);
            peers.iter_mut().find(|p| expected(p) && p.is_proved_by(own, &hello))
        });
        match peer {
            Some(peer) => {
                let rank = peer.rank;
                peer.adopt(own, link).map_err(|e| connect_error(own.kind, rank, e))?;
            }
            None => self.refuse("it did not prove a rank"),
        }
        Ok(())
    }

    fn refuse(&mut self, reason: &'static str) {
        if self.unproven.is_new_reason(reason) {
            log::warn!("closed a connection to the socket of {}: {reason}", self.own.rank);
        }
    }

    /// Sleeps until a connection, a message, or the next dial; at most `timeout`.
    fn sleep(&self, timeout: Duration) {
        let undialled = |p: &&PendingPeer| p.link.is_none() && p.is_dialled_by(&self.own);
        let next = self.peers.iter().filter(undialled).map(|peer| peer.dial_at).min();
        let until_next = next.map_or(timeout, |at| at.since(clock::now()));
        let mut polled = vec![PollFd::new(self.own.listener, PollFlags::IN)];
        polled.extend(self.unproven.iter().map(|(_, link)| link.interest(true)));
        // A connected peer may close its socket at any time; that is not an event here.
        let links =
            self.peers.iter().filter_map(|p| Some((p.link.as_ref()?, p.introduction.is_none())));
        polled.extend(links.map(|(link, read)| link.interest(read)));
        wait::sleep(&mut polled, until_next.min(timeout));
    }

    /// Error at the deadline, which names a missing peer.
    fn deadline_error(&self) -> Error {
        let mut missing = self.peers.iter().filter(|peer| peer.introduction.is_none());
        let first = missing.next();
        let mut detail =
            format!("not connected before the deadline, like {} others", missing.count());
        if let Some(failure) = first.and_then(|peer| peer.failure.as_ref()) {
            detail = format!("{detail}; the last attempt failed: {failure}");
        }
        let first = first.map_or(self.own.rank, |peer| peer.rank);
        connect_error(self.own.kind, first, detail)
    }
}
