//! Frames over a socket that does not block.

use crate::fork_guard::{self, Registration};
use crate::wire::{Malformed, Parser};
use crate::{Error, Result};
use rustix::net::sockopt;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Reads that one turn takes: at most a megabyte, so that other connections of the process get their turn.
const READS_AT_ONCE: u32 = 256;

/// The end of a connection.
#[derive(Debug)]
pub(super) enum Ended {
    /// The other end, or the system, closed it.
    Closed(io::Error),
    /// The other end broke the protocol.
    Protocol(Malformed),
    /// Nothing came from the other end for this time.
    Silent(Duration),
}

/// A connected socket, the frames that come and those that wait to leave.
pub(super) struct FrameSocket {
    _guard: Registration,
    stream: TcpStream,
    parser: Parser,
    unsent: Vec<u8>,
    reads_left: u32,
    /// When bytes came last.
    pub heard: Instant,
}

impl FrameSocket {
    /// Over a connected stream. The system ends the connection after `silence` without an
    /// acknowledgement from the other host.
    pub fn new(stream: TcpStream, parser: Parser, silence: Duration) -> io::Result<FrameSocket> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let probe = Duration::from_secs((silence.as_secs() / 3).clamp(1, 3600));
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, probe)?;
        sockopt::set_tcp_keepintvl(&stream, probe)?;
        sockopt::set_tcp_keepcnt(&stream, 2)?;
        let milliseconds = u32::try_from(silence.as_millis()).unwrap_or(u32::MAX).max(1);
        sockopt::set_tcp_user_timeout(&stream, milliseconds)?;
        let _guard = fork_guard::register(&stream);
        let (unsent, reads_left, heard) = (Vec::new(), READS_AT_ONCE, Instant::now());
        Ok(FrameSocket { _guard, stream, parser, unsent, reads_left, heard })
    }

    /// Sends now what the socket takes, the rest at a later [`FrameSocket::flush`].
    pub fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        self.unsent.extend_from_slice(frame);
        self.flush()
    }

    pub fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.unsent.shrink_to(1024);
        Ok(())
    }

    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Begins a turn of [`FrameSocket::receive`].
    pub fn begin_turn(&mut self) {
        self.reads_left = READS_AT_ONCE;
    }

    /// Whether the turn ended before all that has come was read.
    pub fn has_unread(&self) -> bool {
        self.reads_left == 0
    }

    /// The next frame's body, if all of it has come. `None` also where the turn has ended.
    pub fn receive(&mut self) -> std::result::Result<Option<Vec<u8>>, Ended> {
        loop {
            if let Some(frame) = self.parser.next().map_err(Ended::Protocol)? {
                return Ok(Some(frame));
            }
            if self.reads_left == 0 {
                return Ok(None);
            }
            self.reads_left -= 1;
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => {
                    let detail = "its connection was closed without a goodbye";
                    return Err(Ended::Closed(io::Error::new(ErrorKind::UnexpectedEof, detail)));
                }
                Ok(count) => {
                    self.heard = Instant::now();
                    self.parser.feed(bytes.get(..count).unwrap_or_default());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // Nothing is left unread, also if this was the turn's last read.
                    self.reads_left += 1;
                    return Ok(None);
                }
                Err(error) => return Err(Ended::Closed(error)),
            }
        }
    }

    pub fn shut_down(&self) {
        // It fails where the connection has ended already.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }
}

impl AsFd for FrameSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// A listening socket that does not block, with a backlog of 4096 connections.
///
/// # Errors
/// [`Error::PairListen`] if the address cannot be listened on; [`Error::Descriptors`].
pub fn nonblocking_listener(host: &str, port: u16) -> Result<TcpListener> {
    let address = format!("{host}:{port}");
    let failed = |source: io::Error| match name_of_descriptors("listening", source) {
        Error::System { source, .. } => Error::PairListen { address: address.clone(), source },
        named => named,
    };
    let mut last = io::Error::new(ErrorKind::NotFound, "the host name has no address");
    for address in (host, port).to_socket_addrs().map_err(failed)? {
        match TcpListener::bind(address) {
            Ok(listener) => {
                // Listening again only lengthens the backlog; many processes may connect at once.
                let _ = rustix::net::listen(&listener, 4096);
                listener.set_nonblocking(true).map_err(failed)?;
                return Ok(listener);
            }
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

/// The error of a system call: [`Error::Descriptors`] if the process has none left.
pub fn name_of_descriptors(doing: &'static str, source: io::Error) -> Error {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    match source.raw_os_error() {
        Some(libc::EMFILE) => Error::Descriptors { doing, limit: limit.unwrap_or(u64::MAX) },
        _ => Error::System { doing, source },
    }
}
