//! Descriptor socket: a Unix socket to one peer with small messages that carry descriptors.
//!
//! Neither end blocks on it. Messages that the socket does not accept at once wait in a queue, which
//! every import, grant and poll flushes, so two ranks that both fill the socket cannot deadlock.

use super::address::ProofToken;
use super::credentials::PeerCredentials;
use crate::bytes::Reader;
use crate::types::{Generation, RegionKey};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use weft_control::Rank;

/// A message from one end to the other.
#[derive(Debug)]
pub(super) enum LocalMessage {
    /// First message in both directions: the sender's rank, authenticated by the token in the address.
    Hello { from: Rank, generation: Generation, token: ProofToken },
    /// The sender's lane table. Sent to a peer that has proved to be that rank.
    Table { capacity: u32, memory: OwnedFd },
    /// Granted memory. The serial separates it from earlier regions with the same key.
    Region { key: RegionKey, serial: u64, memory: OwnedFd },
    /// Event descriptor that wakes the sender. It is sent before the sender first sleeps on a descriptor.
    Wake { wake: OwnedFd },
}

const HELLO: u8 = 1;
const TABLE: u8 = 2;
const REGION: u8 = 3;
const WAKE: u8 = 4;
const MAX_BYTES: usize = 64;
const MAX_DESCRIPTORS: usize = 1;

impl LocalMessage {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(MAX_BYTES);
        match self {
            LocalMessage::Hello { from, generation, token } => {
                out.push(HELLO);
                out.extend_from_slice(&from.0.to_le_bytes());
                out.push(generation.0);
                out.extend_from_slice(token);
            }
            LocalMessage::Table { capacity, .. } => {
                out.push(TABLE);
                out.extend_from_slice(&capacity.to_le_bytes());
            }
            LocalMessage::Region { key, serial, .. } => {
                out.push(REGION);
                out.extend_from_slice(&key.0.to_le_bytes());
                out.extend_from_slice(&serial.to_le_bytes());
            }
            LocalMessage::Wake { .. } => out.push(WAKE),
        }
        out
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            LocalMessage::Hello { .. } => vec![],
            LocalMessage::Table { memory, .. } | LocalMessage::Region { memory, .. } => {
                vec![memory.as_fd()]
            }
            LocalMessage::Wake { wake } => vec![wake.as_fd()],
        }
    }

    /// True for the first message on a connection.
    pub fn is_hello(&self) -> bool {
        matches!(self, LocalMessage::Hello { .. })
    }

    fn decode(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Option<LocalMessage> {
        let mut reader = Reader::new(bytes);
        let mut descriptors = descriptors.into_iter();
        let message = match reader.u8()? {
            HELLO => LocalMessage::Hello {
                from: Rank(reader.u32()?),
                generation: Generation(reader.u8()?),
                token: reader.bytes(size_of::<ProofToken>())?.try_into().ok()?,
            },
            TABLE => LocalMessage::Table { capacity: reader.u32()?, memory: descriptors.next()? },
            REGION => LocalMessage::Region {
                key: RegionKey(reader.u32()?),
                serial: reader.u64()?,
                memory: descriptors.next()?,
            },
            WAKE => LocalMessage::Wake { wake: descriptors.next()? },
            _ => return None,
        };
        (reader.is_at_end() && descriptors.next().is_none()).then_some(message)
    }
}

/// One socket end.
#[derive(Debug)]
pub(super) struct DescriptorSocket {
    socket: OwnedFd,
    unsent: VecDeque<LocalMessage>,
}

impl DescriptorSocket {
    /// Takes a connected, non-blocking socket that keeps message boundaries.
    pub fn new(socket: OwnedFd) -> DescriptorSocket {
        DescriptorSocket { socket, unsent: VecDeque::new() }
    }

    /// The process at the other end.
    pub fn process(&self) -> io::Result<PeerCredentials> {
        PeerCredentials::of(&self.socket)
    }

    /// Sends now if the socket has room, otherwise at a later [`DescriptorSocket::flush`].
    pub fn send(&mut self, message: LocalMessage) -> io::Result<()> {
        self.queue(message);
        self.flush()
    }

    /// Sends at a later [`DescriptorSocket::flush`].
    pub fn queue(&mut self, message: LocalMessage) {
        self.unsent.push_back(message);
    }

    /// Closes the connection; returns the queued messages.
    pub fn into_unsent(self) -> VecDeque<LocalMessage> {
        self.unsent
    }

    /// Further messages fail at the sender; messages already sent stay readable.
    pub fn refuse_more(&self) {
        // Fails if the other end has closed, which ends the messages too.
        let _ = shutdown(&self.socket, Shutdown::Read);
    }

    /// Sends queued messages, as many as the socket accepts.
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
                // `TOOMANYREFS`: too many of this user's descriptors are inside sockets.
                Err(Errno::AGAIN | Errno::TOOMANYREFS) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// True with queued messages.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// The next message, or `None` if none has arrived. An error ends the connection.
    pub fn receive(&mut self) -> io::Result<Option<LocalMessage>> {
        confirm_end(|| self.receive_once())
    }

    fn receive_once(&mut self) -> io::Result<Option<LocalMessage>> {
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
            // A descriptor was lost: this process may open no more.
            return Err(Errno::MFILE.into());
        }
        match LocalMessage::decode(&bytes[..received.bytes], descriptors) {
            Some(message) if !received.flags.contains(ReturnFlags::TRUNC) => Ok(Some(message)),
            _ => Err(io::Error::other("it sent a malformed message")),
        }
    }

    /// Poll events: writability for unsent messages, readability if `read`.
    pub fn interest(&self, read: bool) -> PollFd<'_> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, read);
        events.set(PollFlags::OUT, self.has_unsent());
        PollFd::new(&self.socket, events)
    }
}

/// Error for a message that this protocol state excludes.
pub(super) fn wrong_order() -> io::Error {
    io::Error::other("it sent messages in the wrong order")
}

/// Calls `receive` again after the end of a connection. Linux looks for a message and then, under another
/// lock, for the end: a message that arrives between the two, just before the other end closes, is
/// reported as the end by the first call and returned by the second. An error is final: ends are closed only
/// once they have read all.
fn confirm_end<T>(mut receive: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    match receive() {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => receive(),
        received => received,
    }
}

#[cfg(test)]
mod tests {
    use super::confirm_end;
    use std::io::{Error, ErrorKind};

    #[test]
    fn a_message_that_the_kernel_reports_as_the_end_arrives() {
        let ended = || Error::from(ErrorKind::UnexpectedEof);
        let mut calls = vec![Ok(7), Err(ended())];
        assert_eq!(confirm_end(|| calls.pop().unwrap()).unwrap(), 7);
        let mut calls = vec![Ok(7), Err(ended()), Err(ended())];
        let error = confirm_end(|| calls.pop().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        let mut calls = vec![Ok(7), Err(Error::from(ErrorKind::ConnectionReset))];
        let error = confirm_end(|| calls.pop().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
}
