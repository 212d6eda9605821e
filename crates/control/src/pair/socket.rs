//! Frames over a non-blocking socket.

use crate::fork_guard::{self, Registration};
use crate::resolve::{LOCALHOST, host_and_port, loopback_addresses};
use crate::tls::MaybeTlsStream;
use crate::wire::{FrameParser, Malformed};
use crate::{Error, Result};
use rustix::net::sockopt;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// 4 KiB reads in one turn: at most 1 MiB, so that each connection in the process gets a turn.
const READS_AT_ONCE: u32 = 256;

/// Reason why a connection ended.
#[derive(Debug)]
pub(super) enum ConnectionEnd {
    /// Closed by the other end or the system.
    Closed(io::Error),
    /// Protocol violation by the other end.
    Protocol(Malformed),
    /// No byte from the other end for this time.
    Silent(Duration),
}

/// Connected socket with a frame parser and a send buffer.
pub(super) struct FrameSocket {
    _guard: Registration,
    stream: MaybeTlsStream,
    parser: FrameParser,
    unsent: Vec<u8>,
    reads_left: u32,
    /// Time when bytes were last received.
    pub last_received: Instant,
}

impl FrameSocket {
    /// Wraps a connected stream. The system ends the connection after `silence` without an acknowledgement from
    /// the other host (TCP_USER_TIMEOUT).
    pub fn new(
        stream: MaybeTlsStream,
        parser: FrameParser,
        silence: Duration,
    ) -> io::Result<FrameSocket> {
        stream.tcp().set_nonblocking(true)?;
        stream.tcp().set_nodelay(true)?;
        let probe = Duration::from_secs((silence.as_secs() / 3).clamp(1, 3600));
        sockopt::set_socket_keepalive(stream.tcp(), true)?;
        sockopt::set_tcp_keepidle(stream.tcp(), probe)?;
        sockopt::set_tcp_keepintvl(stream.tcp(), probe)?;
        sockopt::set_tcp_keepcnt(stream.tcp(), 2)?;
        let milliseconds = u32::try_from(silence.as_millis()).unwrap_or(u32::MAX).max(1);
        sockopt::set_tcp_user_timeout(stream.tcp(), milliseconds)?;
        let _guard = fork_guard::register(stream.tcp());
        let (unsent, reads_left, last_received) = (Vec::new(), READS_AT_ONCE, Instant::now());
        Ok(FrameSocket { _guard, stream, parser, unsent, reads_left, last_received })
    }

    /// Queues a frame and sends as much as the socket accepts; [`FrameSocket::flush`] sends the rest.
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
        // Encrypted bytes from earlier calls.
        self.stream.flush()
    }

    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty() || self.stream.has_unsent()
    }

    /// Starts a [`FrameSocket::receive`] turn.
    pub fn begin_turn(&mut self) {
        self.reads_left = READS_AT_ONCE;
    }

    /// True if the turn ended with bytes unread.
    pub fn has_unread(&self) -> bool {
        self.reads_left == 0
    }

    /// Next frame body, once complete. `None` also when the turn ends.
    pub fn receive(&mut self) -> std::result::Result<Option<Vec<u8>>, ConnectionEnd> {
        loop {
            if let Some(frame) = self.parser.next().map_err(ConnectionEnd::Protocol)? {
                return Ok(Some(frame));
            }
            if self.reads_left == 0 {
                return Ok(None);
            }
            self.reads_left -= 1;
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => {
                    let detail = "its connection was closed without a leave message";
                    return Err(ConnectionEnd::Closed(io::Error::new(
                        ErrorKind::UnexpectedEof,
                        detail,
                    )));
                }
                Ok(count) => {
                    self.last_received = Instant::now();
                    self.parser.feed(bytes.get(..count).unwrap_or_default());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // The socket is drained, even if this was the turn's last read.
                    self.reads_left += 1;
                    return Ok(None);
                }
                Err(error) => return Err(ConnectionEnd::Closed(error)),
            }
        }
    }

    pub fn shut_down(&mut self) {
        self.stream.shut_down();
    }

    pub fn stream(&self) -> &TcpStream {
        self.stream.tcp()
    }
}

impl AsFd for FrameSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Non-blocking listener with a 4096-connection backlog.
///
/// # Errors
/// [`Error::PairListen`] if the address cannot be listened on; [`Error::Descriptors`].
pub fn nonblocking_listener(host: &str, port: u16) -> Result<TcpListener> {
    let address = host_and_port(host, port);
    let failed = |source: io::Error| match descriptor_error("listening", source) {
        Error::System { source, .. } => Error::PairListen { address: address.clone(), source },
        named => named,
    };
    let mut last = io::Error::new(ErrorKind::NotFound, "the host name has no address");
    let addresses = match host {
        LOCALHOST => loopback_addresses(port),
        _ => (host, port).to_socket_addrs().map_err(failed)?.collect(),
    };
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => {
                // A second listen call lengthens the backlog; many processes may connect at once.
                let _ = rustix::net::listen(&listener, 4096);
                listener.set_nonblocking(true).map_err(failed)?;
                return Ok(listener);
            }
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

/// System call error: [`Error::Descriptors`] for EMFILE.
pub fn descriptor_error(doing: &'static str, source: io::Error) -> Error {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    match source.raw_os_error() {
        Some(libc::EMFILE) => Error::Descriptors { doing, limit: limit.unwrap_or(u64::MAX) },
        _ => Error::System { doing, source },
    }
}
