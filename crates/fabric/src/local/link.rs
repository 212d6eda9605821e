//! A Unix socket to one peer: small messages that carry descriptors.
//!
//! Neither end ever blocks on it. Messages that the socket does not take at once wait in a queue, which
//! every import, grant and poll tries again; so two ranks that push more than a socket holds cannot stop
//! each other.

use crate::bytes::Reader;
use crate::types::{Generation, RegionKey};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use weft_control::Rank;

use super::Token;

/// A message from one end to the other.
#[derive(Debug)]
pub(super) enum Message {
    /// First in both directions: the sender's rank, proved by the token of its address.
    Hello { from: Rank, generation: Generation, token: Token },
    /// The lane table of the sender, and the descriptor that wakes it. Sent to a peer that has proved
    /// its rank.
    Table { capacity: u32, memory: OwnedFd, wake: OwnedFd },
    /// Memory that was granted. The serial separates it from earlier regions of the same key.
    Region { key: RegionKey, serial: u64, memory: OwnedFd },
}

const HELLO: u8 = 1;
const TABLE: u8 = 2;
const REGION: u8 = 3;
const MAX_BYTES: usize = 64;
const MAX_DESCRIPTORS: usize = 2;

impl Message {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(MAX_BYTES);
        match self {
            Message::Hello { from, generation, token } => {
                out.push(HELLO);
                out.extend_from_slice(&from.0.to_le_bytes());
                out.push(generation.0);
                out.extend_from_slice(token);
            }
            Message::Table { capacity, .. } => {
                out.push(TABLE);
                out.extend_from_slice(&capacity.to_le_bytes());
            }
            Message::Region { key, serial, .. } => {
                out.push(REGION);
                out.extend_from_slice(&key.0.to_le_bytes());
                out.extend_from_slice(&serial.to_le_bytes());
            }
        }
        out
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Message::Hello { .. } => vec![],
            Message::Table { memory, wake, .. } => vec![memory.as_fd(), wake.as_fd()],
            Message::Region { memory, .. } => vec![memory.as_fd()],
        }
    }

    fn decode(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Option<Message> {
        let mut reader = Reader::new(bytes);
        let mut descriptors = descriptors.into_iter();
        let message = match reader.u8()? {
            HELLO => Message::Hello {
                from: Rank(reader.u32()?),
                generation: Generation(reader.u8()?),
                token: reader.bytes(size_of::<Token>())?.try_into().ok()?,
            },
            TABLE => Message::Table {
                capacity: reader.u32()?,
                memory: descriptors.next()?,
                wake: descriptors.next()?,
            },
            REGION => Message::Region {
                key: RegionKey(reader.u32()?),
                serial: reader.u64()?,
                memory: descriptors.next()?,
            },
            _ => return None,
        };
        (reader.is_at_end() && descriptors.next().is_none()).then_some(message)
    }
}

/// One end of the socket.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    unsent: VecDeque<Message>,
}

impl Link {
    /// Over a connected, non-blocking socket that keeps message boundaries.
    pub fn new(socket: OwnedFd) -> Link {
        Link { socket, unsent: VecDeque::new() }
    }

    /// Sends now if the socket has room, at a later [`Link::flush`] if not.
    pub fn send(&mut self, message: Message) -> io::Result<()> {
        self.unsent.push_back(message);
        self.flush()
    }

    /// Sends the queued messages, as many as the socket takes.
    pub fn flush(&mut self) -> io::Result<()> {
        while let Some(message) = self.unsent.front() {
            let descriptors = message.descriptors();
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                let pushed = control.push(SendAncillaryMessage::ScmRights(&descriptors));
                debug_assert!(pushed, "there is space for as many descriptors as any message has");
            }
            let bytes = message.encode();
            match sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
            {
                Ok(_) => drop(self.unsent.pop_front()),
                Err(Errno::INTR) => {}
                // The second: too many descriptors of this user are inside sockets just now.
                Err(Errno::AGAIN | Errno::TOOMANYREFS) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Whether messages wait in the queue.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// The next message, or `None` if there is none yet. An error ends the link.
    pub fn receive(&mut self) -> io::Result<Option<Message>> {
        let mut bytes = [0; MAX_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut into = [IoSliceMut::new(&mut bytes)];
            match recvmsg(&self.socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        };
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if received.bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed its connection"));
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::other(
                "a descriptor was lost: this process may open no more files (raise `ulimit -n`)",
            ));
        }
        match Message::decode(&bytes[..received.bytes], descriptors) {
            Some(message) if !received.flags.contains(ReturnFlags::TRUNC) => Ok(Some(message)),
            _ => Err(io::Error::other("it sent a malformed message")),
        }
    }

    /// The events to poll for: room for what is unsent, and messages if `read`.
    pub fn interest(&self, read: bool) -> PollFd<'_> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, read);
        events.set(PollFlags::OUT, self.has_unsent());
        PollFd::new(&self.socket, events)
    }
}

/// A message that this state of the protocol excludes.
pub(super) fn wrong_order() -> io::Error {
    io::Error::other("it sent messages in the wrong order")
}
