//! Outbox toward a connected peer: messages with descriptors, over a connection that lasts until all are sent.
//!
//! The peer listens for as long as the group has links. A connection begins with the hello, and the
//! kernel keeps messages until the peer looks, so that no end waits for the other; ranks without grants
//! keep no connection.

use super::address::ProofToken;
use super::credentials::PeerCredentials;
use super::descriptor_socket::{DescriptorSocket, LocalMessage};
use super::socket;
use crate::types::Generation;
use rustix::event::PollFd;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use weft_control::{Rank, limits};

/// Consecutive connections that the peer may close before the hello.
const MAX_REDIALS: u32 = 8;

/// A rank's first message: number and token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub from: Rank,
    pub generation: Generation,
    pub token: ProofToken,
}

impl From<Hello> for LocalMessage {
    fn from(Hello { from, generation, token }: Hello) -> LocalMessage {
        LocalMessage::Hello { from, generation, token }
    }
}

/// Messages to one peer that are not sent.
#[derive(Debug)]
pub(super) struct Outbox {
    /// Peer's listening socket name, and the process that it proved to be.
    name: Vec<u8>,
    process: PeerCredentials,
    hello: Hello,
    waiting: VecDeque<LocalMessage>,
    connection: Option<DescriptorSocket>,
}

impl Outbox {
    /// An empty outbox toward the process that listens under this name.
    pub fn new(name: Vec<u8>, process: PeerCredentials, hello: Hello) -> Outbox {
        Outbox { name, process, hello, waiting: VecDeque::new(), connection: None }
    }

    /// Sends now if the peer's socket has room, otherwise at a later [`Outbox::flush`].
    pub fn send(&mut self, message: LocalMessage) -> io::Result<()> {
        self.waiting.push_back(message);
        self.flush()
    }

    /// True with unsent messages.
    pub fn has_unsent(&self) -> bool {
        !self.waiting.is_empty() || self.connection.is_some()
    }

    /// Sends as many messages as the peer's socket accepts. They stay if this process lacks a descriptor for it, and are
    /// dropped after any other error.
    pub fn flush(&mut self) -> io::Result<()> {
        let mut redials = 0;
        while self.has_unsent() {
            let outcome = self.transmit();
            match outcome {
                Ok(true) => self.connection = None,
                Ok(false) => return Ok(()),
                // The peer drops a connection whose hello was late.
                Err(error) if is_closed(&error) && redials < MAX_REDIALS => {
                    redials += 1;
                    let unsent = self.connection.take().map(DescriptorSocket::into_unsent);
                    let messages = unsent.into_iter().flatten();
                    self.waiting = messages
                        .filter(|message| !message.is_hello())
                        .chain(self.waiting.drain(..))
                        .collect();
                }
                Err(error) if limits::is_exhausted(&error) => return Err(error),
                Err(error) => {
                    (self.connection, self.waiting) = (None, VecDeque::new());
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// True once all messages are sent.
    fn transmit(&mut self) -> io::Result<bool> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => {
                let Some(socket) = socket::dial(&self.name)? else { return Ok(false) };
                if PeerCredentials::of(&socket)? != self.process {
                    return Err(io::Error::other("another process listens in its place"));
                }
                let connection = none.insert(DescriptorSocket::new(socket));
                connection.queue(self.hello.into());
                connection
            }
        };
        self.waiting.drain(..).for_each(|message| connection.queue(message));
        connection.flush()?;
        Ok(!connection.has_unsent())
    }

    /// Poll event for a connection with unsent messages.
    pub fn interest(&self) -> Option<PollFd<'_>> {
        Some(self.connection.as_ref()?.interest(false))
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}
