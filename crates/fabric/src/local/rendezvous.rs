//! Rendezvous between ranks on one host: one socket to each peer, both ends authenticated, one
//! introduction each way.
//!
//! An introduction is a message with descriptors: a provider sends a lane table, a
//! [`super::DescriptorExchange`] one region. In each pair the lower rank dials, the higher accepts; one
//! loop serves all pairs at once, so no order can deadlock. Unproven connections are bounded in number
//! and time ([`crate::unproven`]); a peer whose connection was evicted dials again.

use super::address::LocalAddress;
use super::credentials::PeerCredentials;
use super::descriptor_socket::{DescriptorSocket, LocalMessage};
use super::errors::{connect_error, io_error};
use super::pending_peer::{PendingPeer, RendezvousEnd};
use super::{WaitLimit, socket, wait};
use crate::clock;
use crate::error::{Error, Result};
use crate::types::Time;
use crate::unproven::{MAX_UNPROVEN, UnprovenConnections};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use std::io::ErrorKind;
use std::time::Duration;
use weft_control::Rank;

/// Pause if this process has no descriptor left for a connection.
const DESCRIPTOR_PAUSE: Duration = Duration::from_millis(10);
/// Time for which a rank waits for a descriptor.
const EXHAUSTED_TIME: Duration = Duration::from_secs(1);

/// A connected peer.
pub(super) struct ConnectedPeer {
    pub rank: Rank,
    pub address: LocalAddress,
    pub process: PeerCredentials,
    pub introduction: LocalMessage,
}

/// Rendezvous outcome: all peers, and the other connections to the listener.
pub(super) struct Connected {
    pub peers: Vec<ConnectedPeer>,
    /// Further connections from peers that were connected before this rank was.
    pub early: Vec<(Rank, DescriptorSocket)>,
    pub unproven: UnprovenConnections<DescriptorSocket>,
}

/// Rendezvous state.
pub(super) struct Rendezvous<'a> {
    own: RendezvousEnd<'a>,
    peers: Vec<PendingPeer>,
    /// Accepted connections that have not proved a rank.
    unproven: UnprovenConnections<DescriptorSocket>,
    /// See [`Connected::early`].
    early: Vec<(Rank, DescriptorSocket)>,
    /// Time since which no connection could be accepted.
    exhausted_since: Option<Time>,
}

impl<'a> Rendezvous<'a> {
    /// A rendezvous with `peers`, by rank and encoded address.
    pub fn new(own: RendezvousEnd<'a>, peers: &[(Rank, &[u8])]) -> Result<Rendezvous<'a>> {
        let peers = peers.iter().map(|&(rank, address)| PendingPeer::new(rank, address));
        let peers = peers.collect::<Result<_>>()?;
        Ok(Rendezvous {
            own,
            peers,
            unproven: UnprovenConnections::new(),
            early: Vec::new(),
            exhausted_since: None,
        })
    }

    /// Connects all peers, or returns an error that names the first missing one. The connections are closed: each end
    /// has the other's introduction.
    pub fn run(mut self, limit: &mut WaitLimit<'_>) -> Result<Connected> {
        while !self.step()? {
            match limit.park()? {
                Some(timeout) => self.sleep(timeout),
                None => return Err(self.deadline_error()),
            }
        }
        let mut peers = Vec::with_capacity(self.peers.len());
        for PendingPeer { rank, address, link, introduction, .. } in self.peers {
            if let (Some(link), Some(introduction)) = (link, introduction) {
                let process = link.process();
                let process = process.map_err(|error| io_error(self.own.kind, rank, error))?;
                peers.push(ConnectedPeer { rank, address, process, introduction });
            }
        }
        Ok(Connected { peers, early: self.early, unproven: self.unproven })
    }

    /// Advances all connections without waiting; returns true once all peers are connected.
    fn step(&mut self) -> Result<bool> {
        let now = clock::now();
        self.accept(now)?;
        self.receive_hellos()?;
        while let Some(expired) = self.unproven.drop_expired(now) {
            self.close(expired);
            self.refuse("no hello in time");
        }
        let Rendezvous { own, peers, .. } = self;
        for peer in peers.iter_mut() {
            peer.step(own, now).map_err(|error| io_error(own.kind, peer.rank, error))?;
        }
        Ok(peers.iter().all(PendingPeer::is_connected))
    }

    fn accept(&mut self, now: Time) -> Result<()> {
        for _ in 0..MAX_UNPROVEN {
            let socket = match socket::accept(self.own.listener) {
                Ok(socket) => socket,
                // This error concerns one connection, not the listener.
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                    // The oldest unproven connection frees a descriptor for the next one.
                    if let Some(oldest) = self.unproven.drop_oldest() {
                        self.close(oldest);
                    } else {
                        let since = *self.exhausted_since.get_or_insert(now);
                        if now.since(since) >= EXHAUSTED_TIME {
                            return Err(Error::system("cannot accept ranks of this host", error));
                        }
                        std::thread::sleep(DESCRIPTOR_PAUSE);
                    }
                    self.refuse("no descriptors left");
                    break;
                }
                // No connection waits.
                Err(_) => {
                    self.exhausted_since = None;
                    break;
                }
            };
            self.exhausted_since = None;
            if !socket::is_of_this_user(&socket) {
                self.refuse("it is from a process of another user");
                continue;
            }
            let (id, dropped) = self.unproven.add(DescriptorSocket::new(socket), now);
            if let Some(dropped) = dropped {
                self.close(dropped);
                self.refuse("too many connections without a hello");
            }
            // A peer's hello may have arrived already.
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
        // A peer in another user namespace connects once to see which user owns this socket.
        if matches!(&message, Err(error) if error.kind() == ErrorKind::UnexpectedEof) {
            return Ok(());
        }
        let Rendezvous { own, peers, early, .. } = self;
        let peer =
            message.ok().and_then(|hello| peers.iter_mut().find(|p| p.is_proved_by(own, &hello)));
        match peer {
            // It is connected already, and sends the first descriptors.
            Some(peer) if peer.link.is_some() => early.push((peer.rank, link)),
            Some(peer) if !peer.is_dialled_by(own) => {
                let rank = peer.rank;
                peer.adopt(own, link).map_err(|e| io_error(own.kind, rank, e))?;
            }
            _ => self.refuse("it did not prove a rank"),
        }
        Ok(())
    }

    /// Closes a connection without a hello, unless it belongs to a connected peer and the hello arrives
    /// now, as in [`super::Arrivals`]. A peer that is not connected dials again.
    fn close(&mut self, mut connection: DescriptorSocket) {
        connection.refuse_more();
        let Ok(Some(hello)) = connection.receive() else { return };
        let Rendezvous { own, peers, early, .. } = self;
        let sender = peers.iter().find(|peer| peer.is_proved_by(own, &hello));
        if let Some(peer) = sender.filter(|peer| peer.link.is_some()) {
            early.push((peer.rank, connection));
        }
    }

    fn refuse(&mut self, reason: &'static str) {
        if self.unproven.is_new_reason(reason) {
            log::warn!("closed a connection to the socket of {}: {reason}", self.own.rank());
        }
    }

    /// Sleeps until a connection, a message, or the next dial; at most `timeout`.
    fn sleep(&self, timeout: Duration) {
        let undialled = |p: &&PendingPeer| p.link.is_none() && p.is_dialled_by(&self.own);
        let next = self.peers.iter().filter(undialled).map(|peer| peer.dial_at).min();
        let until_next = next.map_or(timeout, |at| at.since(clock::now()));
        let mut polled = vec![PollFd::new(self.own.listener, PollFlags::IN)];
        polled.extend(self.unproven.iter().map(|(_, link)| link.interest(true)));
        // A connected peer may close the socket at any time, which `poll` would report without end.
        let pending = self.peers.iter().filter(|peer| !peer.is_connected());
        let links = pending.filter_map(|p| Some((p.link.as_ref()?, p.introduction.is_none())));
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
        let first = first.map_or(self.own.rank(), |peer| peer.rank);
        connect_error(self.own.kind, first, detail)
    }
}
