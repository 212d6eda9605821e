//! Pending rendezvous peer: dialled or accepted, authenticated, introduced.

use super::address::LocalAddress;
use super::descriptor_socket::{DescriptorSocket, LocalMessage, wrong_order};
use super::outbox::Hello;
use super::socket;
use crate::error::{Error, Result};
use crate::types::{ProviderKind, Time};
use rustix::fd::OwnedFd;
use std::io;
use std::time::Duration;
use weft_control::Rank;

/// Pause before redialling a peer with a full backlog, which has no event for room.
const BACKLOG_FULL: Duration = Duration::from_millis(1);
/// Pause before redialling a peer that closed the connection before the hello.
const REDIAL: Duration = Duration::from_millis(50);

/// This rank's end in the rendezvous.
pub(super) struct RendezvousEnd<'a> {
    /// Provider named in errors.
    pub kind: ProviderKind,
    pub hello: Hello,
    pub listener: &'a OwnedFd,
    /// Makes the message for each peer that has proved to be that rank.
    pub introduction: &'a dyn Fn() -> io::Result<LocalMessage>,
}

/// Pending connection to a peer.
pub(super) struct PendingPeer {
    pub rank: Rank,
    pub address: LocalAddress,
    pub link: Option<DescriptorSocket>,
    is_proved: bool,
    pub introduction: Option<LocalMessage>,
    /// Next dial time.
    pub dial_at: Time,
    /// Error from the previous attempt.
    pub failure: Option<io::Error>,
}

impl RendezvousEnd<'_> {
    pub fn rank(&self) -> Rank {
        self.hello.from
    }
}

impl PendingPeer {
    /// A connection to the peer whose encoded address is `bytes`.
    pub fn new(rank: Rank, bytes: &[u8]) -> Result<PendingPeer> {
        let address = LocalAddress::decode(bytes).ok_or_else(|| Error::Malformed {
            peer: rank,
            what: "an shm address",
            detail: format!("{} bytes", bytes.len()),
        })?;
        Ok(PendingPeer {
            rank,
            address,
            link: None,
            is_proved: false,
            introduction: None,
            dial_at: Time(0),
            failure: None,
        })
    }

    /// True if a hello authenticates the sender as this peer.
    pub fn is_proved_by(&self, own: &RendezvousEnd<'_>, hello: &LocalMessage) -> bool {
        let expected = (self.rank, own.hello.generation, self.address.token);
        matches!(hello, &LocalMessage::Hello { from, generation, token }
            if (from, generation, token) == expected)
    }

    pub fn is_dialled_by(&self, own: &RendezvousEnd<'_>) -> bool {
        own.rank() < self.rank
    }

    pub fn is_connected(&self) -> bool {
        self.introduction.is_some() && self.link.as_ref().is_some_and(|link| !link.has_unsent())
    }

    /// Advances without waiting.
    pub fn step(&mut self, own: &RendezvousEnd<'_>, now: Time) -> io::Result<()> {
        if self.link.is_none() && self.is_dialled_by(own) && self.dial_at <= now {
            let Some(socket) = socket::dial(&self.address.name)? else {
                self.dial_at = now.after(BACKLOG_FULL);
                return Ok(());
            };
            self.link = Some(DescriptorSocket::new(socket));
            let sent = self.link.as_mut().map_or(Ok(()), |link| link.send(own.hello.into()));
            return self.dial_again_if_closed(sent, own, now);
        }
        let received = self.receive_all(own);
        self.dial_again_if_closed(received, own, now)
    }

    /// Redials a peer that evicted this connection among unproven ones.
    fn dial_again_if_closed(
        &mut self,
        result: io::Result<()>,
        own: &RendezvousEnd<'_>,
        now: Time,
    ) -> io::Result<()> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match result {
            Err(error)
                if !self.is_proved
                    && self.is_dialled_by(own)
                    && matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof) =>
            {
                (self.link, self.failure) = (None, Some(error));
                self.dial_at = now.after(REDIAL);
                Ok(())
            }
            result => result,
        }
    }

    fn receive_all(&mut self, own: &RendezvousEnd<'_>) -> io::Result<()> {
        let Some(link) = &mut self.link else { return Ok(()) };
        link.flush()?;
        while self.introduction.is_none() {
            let Some(message) = self.link.as_mut().map_or(Ok(None), DescriptorSocket::receive)?
            else {
                break;
            };
            self.receive(own, message)?;
        }
        Ok(())
    }

    fn receive(&mut self, own: &RendezvousEnd<'_>, message: LocalMessage) -> io::Result<()> {
        let is_hello = message.is_hello();
        if is_hello == self.is_proved {
            return Err(wrong_order());
        }
        if !is_hello {
            self.introduction = Some(message);
            return Ok(());
        }
        if !self.is_proved_by(own, &message) {
            return Err(io::Error::other(
                "its hello does not carry its token: another process listens in its place",
            ));
        }
        self.is_proved = true;
        self.link.as_mut().map_or(Ok(()), |link| link.send((own.introduction)()?))
    }

    /// Takes over an accepted connection that has proved to be this peer's.
    pub fn adopt(&mut self, own: &RendezvousEnd<'_>, mut link: DescriptorSocket) -> io::Result<()> {
        link.send(own.hello.into())?;
        link.send((own.introduction)()?)?;
        (self.link, self.is_proved) = (Some(link), true);
        Ok(())
    }
}
