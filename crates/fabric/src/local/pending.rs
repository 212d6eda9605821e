//! One peer on the way to being met: dialled or accepted, proved, introduced.

use super::link::wrong_order;
use super::{Address, Link, Message, Token, socket};
use crate::error::{Error, Result};
use crate::types::{Generation, ProviderKind, Time};
use rustix::fd::OwnedFd;
use std::io;
use std::time::Duration;
use weft_control::Rank;

/// Pause before dialling again a peer whose backlog is full: no event announces room in it.
const BACKLOG_FULL: Duration = Duration::from_millis(1);
/// Pause before dialling again a peer that closed the connection before its hello.
const REDIAL: Duration = Duration::from_millis(50);

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

/// A peer on the way to being met.
pub(super) struct Pending {
    pub rank: Rank,
    address: Address,
    pub link: Option<Link>,
    is_proved: bool,
    pub introduction: Option<Message>,
    /// When it is dialled next.
    pub dial_at: Time,
    /// The end of the attempt before.
    pub failure: Option<io::Error>,
}

impl Party<'_> {
    fn hello(&self) -> Message {
        Message::Hello { from: self.rank, generation: self.generation, token: self.token }
    }
}

impl Pending {
    /// A peer whose encoded address is `bytes`.
    pub fn new(rank: Rank, bytes: &[u8]) -> Result<Pending> {
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
    }

    /// Whether a hello proves that its sender is this peer.
    pub fn is_proved_by(&self, party: &Party<'_>, hello: &Message) -> bool {
        let expected = (self.rank, party.generation, self.address.token);
        matches!(hello, &Message::Hello { from, generation, token }
            if (from, generation, token) == expected)
    }

    pub fn is_dialled_by(&self, party: &Party<'_>) -> bool {
        party.rank < self.rank
    }

    pub fn is_met(&self) -> bool {
        self.introduction.is_some() && self.link.as_ref().is_some_and(|link| !link.has_unsent())
    }

    /// Goes on as far as it goes without waiting.
    pub fn step(&mut self, party: &Party<'_>, now: Time) -> io::Result<()> {
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
    pub fn seat(&mut self, party: &Party<'_>, mut link: Link) -> io::Result<()> {
        link.send(party.hello())?;
        link.send((party.introduction)()?)?;
        (self.link, self.is_proved) = (Some(link), true);
        Ok(())
    }
}
