//! Arrivals: connections by which connected peers send descriptors ([`super::outbox::Outbox`]).
//!
//! Connections from unknown processes are bounded in number and time ([`crate::unproven`]). A peer may
//! close a connection before this rank looks; the messages stay readable. A connection that is dropped
//! before the hello is shut down and read once more, so that each message from a peer either arrives or
//! fails there.

use super::descriptor_socket::{DescriptorSocket, LocalMessage, wrong_order};
use super::peer::LocalPeer;
use super::socket;
use crate::clock;
use crate::id_map::PeerMap;
use crate::types::Generation;
use crate::unproven::{MAX_UNPROVEN, UnprovenConnections};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::io::{self, ErrorKind};
use weft_control::Rank;
use weft_control::fork_guard::{self, Registration};

/// Region limit for one rank. Keys are small and dense.
pub(super) const MAX_REGIONS: usize = 1 << 16;

/// A connected rank's listening socket, and the open connections to it.
#[derive(Debug)]
pub(super) struct Arrivals {
    _guard: Registration,
    listener: OwnedFd,
    generation: Generation,
    unproven: UnprovenConnections<DescriptorSocket>,
    proved: Vec<(Rank, DescriptorSocket)>,
}

impl Arrivals {
    /// Arrivals at this listener, with connections that were accepted before.
    pub fn new(
        listener: OwnedFd,
        generation: Generation,
        unproven: UnprovenConnections<DescriptorSocket>,
        proved: Vec<(Rank, DescriptorSocket)>,
    ) -> Arrivals {
        let _guard = fork_guard::register(&listener);
        Arrivals { _guard, listener, generation, unproven, proved }
    }

    /// Receives all messages that have arrived. An error concerns this process, which cannot accept.
    pub fn receive(&mut self, peers: &mut PeerMap<LocalPeer>) -> io::Result<()> {
        let accepted = self.accept(peers);
        let now = clock::now();
        while let Some(expired) = self.unproven.drop_expired(now) {
            self.close(expired, peers);
            self.refuse("no hello in time");
        }
        let ids: Vec<u64> = self.unproven.iter().map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| self.identify(id, peers));
        self.proved.retain_mut(|(from, connection)| read(*from, connection, peers));
        accepted
    }

    fn accept(&mut self, peers: &mut PeerMap<LocalPeer>) -> io::Result<()> {
        for _ in 0..MAX_UNPROVEN {
            let socket = match socket::accept(&self.listener) {
                Ok(socket) => socket,
                // This error concerns one connection, not the listener.
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            if !socket::is_of_this_user(&socket) {
                self.refuse("it is from a process of another user");
                continue;
            }
            let (id, dropped) = self.unproven.add(DescriptorSocket::new(socket), clock::now());
            if let Some(dropped) = dropped {
                self.close(dropped, peers);
                self.refuse("too many connections without a hello");
            }
            self.identify(id, peers);
        }
        Ok(())
    }

    /// Reads a connection's hello, if it has arrived.
    fn identify(&mut self, id: u64, peers: &mut PeerMap<LocalPeer>) {
        let Some(connection) = self.unproven.get_mut(id) else { return };
        let sender = match connection.receive() {
            Ok(None) => return,
            Ok(Some(hello)) => self.sender(&hello, peers),
            // A process in another user namespace connects once to see which user owns this socket.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                return drop(self.unproven.take(id));
            }
            Err(_) => None,
        };
        match (self.unproven.take(id), sender) {
            (Some(connection), Some(sender)) => self.admit(sender, connection, peers),
            _ => self.refuse("it did not prove a rank"),
        }
    }

    /// Reads what a peer has sent, and keeps the connection only if that goes on.
    fn admit(
        &mut self,
        sender: Rank,
        mut connection: DescriptorSocket,
        peers: &mut PeerMap<LocalPeer>,
    ) {
        if read(sender, &mut connection, peers) {
            self.proved.push((sender, connection));
        }
    }

    /// The peer whose hello this is.
    fn sender(&self, hello: &LocalMessage, peers: &PeerMap<LocalPeer>) -> Option<Rank> {
        let &LocalMessage::Hello { from, generation, token } = hello else { return None };
        let peer = peers.get(from)?;
        (generation == self.generation && token == peer.token).then_some(from)
    }

    /// Closes a connection without a hello, unless that arrives now.
    fn close(&mut self, mut connection: DescriptorSocket, peers: &mut PeerMap<LocalPeer>) {
        connection.refuse_more();
        if let Ok(Some(hello)) = connection.receive()
            && let Some(sender) = self.sender(&hello, peers)
        {
            self.admit(sender, connection, peers);
        }
    }

    fn refuse(&mut self, reason: &'static str) {
        if self.unproven.is_new_reason(reason) {
            log::warn!("closed a connection to the socket of a rank: {reason}");
        }
    }

    /// Poll events: new connections, and messages on open ones.
    pub fn interest(&self) -> impl Iterator<Item = PollFd<'_>> {
        let unproven = self.unproven.iter().map(|(_, connection)| connection.interest(true));
        let proved = self.proved.iter().map(|(_, connection)| connection.interest(true));
        std::iter::once(PollFd::new(&self.listener, PollFlags::IN)).chain(unproven).chain(proved)
    }
}

/// Reads a peer's messages; false once the connection has ended. An error is kept for the peer.
fn read(from: Rank, connection: &mut DescriptorSocket, peers: &mut PeerMap<LocalPeer>) -> bool {
    let Some(peer) = peers.get_mut(from) else { return false };
    loop {
        let message = match connection.receive() {
            Ok(Some(message)) => message,
            Ok(None) => return true,
            Err(error) => {
                if error.kind() != ErrorKind::UnexpectedEof {
                    peer.failure = Some(error);
                }
                return false;
            }
        };
        match message {
            LocalMessage::Region { key, serial, memory } if peer.arrived.len() < MAX_REGIONS => {
                peer.arrived.insert((key, serial), memory);
            }
            LocalMessage::Wake { wake } => peer.set_wake(wake),
            _ => {
                peer.failure = Some(wrong_order());
                return false;
            }
        }
    }
}
