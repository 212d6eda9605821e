//! An accepted connection whose other end has not proved itself.

use super::socket::FrameSocket;
use super::{LISTENER, PairControl, Settings, StreamToken, stream_token};
use crate::Result;
use crate::fork_guard::{self, Registration};
use crate::handshake::{Acceptor, AcceptorStep, Failure, Job, Refusal};
use crate::secret::random;
use crate::wire::{MAX_FRAME, Parser};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

/// The largest frame before the other end has proved itself.
const MAX_GUEST_FRAME: usize = 4096;

/// An accepted connection.
pub struct Guest {
    _guard: Registration,
    stream: TcpStream,
    parser: Parser,
    acceptor: Acceptor,
}

/// The state of a [`Guest`].
#[derive(Debug, PartialEq, Eq)]
pub enum GuestStep {
    /// More is to come.
    Pending,
    /// It holds the secret; its description. [`Guest::admit`] lets it in.
    Proved(Vec<u8>),
    /// A further connection of the pair with this token. [`Guest::into_stream`] takes it.
    Stream(StreamToken),
}

impl Guest {
    /// Over a stream that was accepted.
    ///
    /// # Errors
    /// The system's.
    pub fn new(stream: TcpStream, settings: &Settings) -> io::Result<Guest> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let job: Job = random().map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Guest {
            _guard: fork_guard::register(&stream),
            stream,
            parser: Parser::new(MAX_GUEST_FRAME),
            acceptor: Acceptor::new(settings.identity(LISTENER), job, false),
        })
    }

    /// Reads on, as far as it goes without waiting. Reads no byte behind the frame that it ends with.
    ///
    /// # Errors
    /// The reason to close the connection.
    pub fn step(&mut self) -> std::result::Result<GuestStep, &'static str> {
        let mut bytes = [0; MAX_GUEST_FRAME];
        loop {
            if let Some(frame) = self.parser.next().map_err(|malformed| malformed.0)? {
                match self.receive(&frame)? {
                    GuestStep::Pending => continue,
                    step => return Ok(step),
                }
            }
            let lacking = self.parser.lacking().min(bytes.len());
            match self.stream.read(&mut bytes[..lacking]) {
                Ok(0) => return Err("the connection was closed during the handshake"),
                Ok(count) => self.parser.feed(bytes.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return Ok(GuestStep::Pending);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err("the connection failed during the handshake"),
            }
        }
    }

    fn receive(&mut self, frame: &[u8]) -> std::result::Result<GuestStep, &'static str> {
        if let Some(token) = stream_token(frame) {
            return token.map(GuestStep::Stream);
        }
        match self.acceptor.receive(frame) {
            Ok(AcceptorStep::Send(frame)) => {
                self.stream.write_all(&frame).map_err(|_| "the answer could not be sent")?;
                Ok(GuestStep::Pending)
            }
            Ok(AcceptorStep::Proved { details, .. }) => Ok(GuestStep::Proved(details)),
            Err(Failure::Refuse(refusal)) => {
                // A dialler that is gone needs no reason.
                let _ = self.stream.write_all(&refusal.frame());
                Err(match refusal {
                    Refusal::Version(_) => "it speaks another version of the pair protocol",
                    Refusal::WrongSecret => "it holds another secret",
                    _ => "it is no dialler of a pair",
                })
            }
            Err(Failure::Malformed(malformed)) => Err(malformed.0),
            Err(_) => Err("the handshake failed"),
        }
    }

    /// Lets a proved guest in.
    ///
    /// # Errors
    /// The system's.
    pub fn admit(self, settings: &Settings) -> Result<PairControl> {
        let Guest { _guard, stream, mut parser, acceptor } = self;
        parser.set_limit(MAX_FRAME);
        let failed = |source| super::name_of_descriptors("setting up a connection", source);
        let mut socket =
            FrameSocket::new(stream, parser, settings.silence_timeout).map_err(failed)?;
        // The registration of the guest must not be the last: the descriptor is the same.
        drop(_guard);
        if let Some(frame) = acceptor.welcome() {
            socket.send(&frame).map_err(failed)?;
        }
        Ok(PairControl::new(socket, LISTENER, settings))
    }

    /// The socket of a further connection.
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }
}

impl AsFd for Guest {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
