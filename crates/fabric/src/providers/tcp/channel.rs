//! Stream socket, with or without TLS.

use super::socket::{ReceiveVectors, SendVectors};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io::{self, Read as _, Write as _};
use weft_control::pair::MaybeTlsStream;

/// Plain bytes that one call encrypts or decrypts.
const TLS_BYTES: usize = 64 << 10;

/// Nonblocking connected socket.
pub(super) enum Channel {
    Plain(OwnedFd),
    Tls(Box<TlsChannel>),
}

/// Socket with TLS. Payloads are copied through a buffer: other threads may write to payload memory at
/// the same time, so no reference to it may exist.
pub(super) struct TlsChannel {
    stream: MaybeTlsStream,
    buffer: Box<[u8]>,
}

impl Channel {
    /// Channel over a data connection.
    pub fn new(stream: MaybeTlsStream) -> Channel {
        match stream.has_tls() {
            true => {
                Channel::Tls(Box::new(TlsChannel { stream, buffer: vec![0; TLS_BYTES].into() }))
            }
            false => Channel::Plain(stream.into_tcp().into()),
        }
    }

    /// True if less than was asked for is no sign that the socket is full or empty.
    pub fn is_buffered(&self) -> bool {
        matches!(self, Channel::Tls(_))
    }

    /// Takes as many bytes as it accepts now. Called once what it took before has left ([`Channel::has_unsent`]).
    pub fn send(&mut self, sources: &SendVectors<'_>) -> io::Result<usize> {
        let TlsChannel { stream, buffer } = match self {
            Channel::Plain(socket) => return sources.send(socket.as_fd()),
            Channel::Tls(channel) => &mut **channel,
        };
        let copied = sources.copy_to(buffer);
        stream.write(&buffer[..copied])
    }

    /// Receives available bytes; zero at the stream's end.
    pub fn receive(&mut self, room: ReceiveVectors<'_>) -> io::Result<usize> {
        let TlsChannel { stream, buffer } = match self {
            Channel::Plain(socket) => return room.receive(socket.as_fd()),
            Channel::Tls(channel) => &mut **channel,
        };
        let wanted = room.len().min(buffer.len());
        let got = stream.read(&mut buffer[..wanted])?;
        room.copy_from(&buffer[..got]);
        Ok(got)
    }

    /// Sends encrypted bytes that wait in it, as far as the socket accepts them.
    pub fn flush(&mut self) -> io::Result<()> {
        match self {
            Channel::Plain(_) => Ok(()),
            Channel::Tls(channel) => channel.stream.flush(),
        }
    }

    /// True if bytes that were taken wait in it.
    pub fn has_unsent(&self) -> bool {
        matches!(self, Channel::Tls(channel) if channel.stream.has_unsent())
    }

    /// True if bytes wait in it that have left the socket: epoll does not report these.
    pub fn has_unread(&mut self) -> bool {
        match self {
            Channel::Plain(_) => false,
            Channel::Tls(channel) => channel.stream.has_unread(),
        }
    }
}

impl From<OwnedFd> for Channel {
    fn from(socket: OwnedFd) -> Channel {
        Channel::Plain(socket)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Channel::Plain(socket) => socket.as_fd(),
            Channel::Tls(channel) => channel.stream.as_fd(),
        }
    }
}
