//! Accepted connection before the handshake has ended.

use super::control::PairControl;
use super::settings::{LISTENER, PairSettings};
use super::socket::FrameSocket;
use super::stream_token::{StreamToken, stream_token};
use crate::Result;
use crate::fork_guard::{self, Registration};
use crate::handshake::{Acceptor, AcceptorStep, HandshakeError, JobId, Refusal};
use crate::neighbour::{self, OTHER_USER, SHORTAGE, Stranger};
use crate::secret::random_bytes;
use crate::tls::{self, MaybeTlsStream, Tls};
use crate::wire::{FrameParser, MAX_FRAME};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

/// Largest frame before the other end is authenticated.
const MAX_INCOMING_FRAME: usize = 4096;

/// Accepted connection: a pair in the handshake, or a further connection for a pair.
pub struct IncomingConnection {
    _guard: Registration,
    stream: MaybeTlsStream,
    /// Listener TLS; `None` once the first byte has decided on it.
    undecided: Option<Tls>,
    demands_tls: bool,
    /// TLS on data connections is demanded; otherwise it is refused.
    has_payload_tls: bool,
    parser: FrameParser,
    acceptor: Acceptor,
    /// There is no secret: the dialler has to be this user's process.
    checks_user: bool,
}

/// [`IncomingConnection`] state.
#[derive(Debug, PartialEq, Eq)]
pub enum IncomingStep {
    /// Handshake incomplete.
    Pending,
    /// Authenticated, with details. [`IncomingConnection::admit`] admits it.
    Authenticated(Vec<u8>),
    /// Further connection for the pair with this token. [`IncomingConnection::into_stream`] returns the socket.
    Stream(StreamToken),
}

impl IncomingConnection {
    /// Wraps an accepted stream.
    ///
    /// # Errors
    /// The system's.
    pub fn new(stream: TcpStream, settings: &PairSettings) -> io::Result<IncomingConnection> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let job: JobId = random_bytes().map_err(|error| io::Error::other(error.to_string()))?;
        Ok(IncomingConnection {
            _guard: fork_guard::register(&stream),
            stream: MaybeTlsStream::plain(stream),
            undecided: Some(settings.tls.clone()),
            demands_tls: settings.tls.is_demanded(),
            has_payload_tls: settings.tls.is_of_payloads(),
            parser: FrameParser::new(MAX_INCOMING_FRAME),
            acceptor: Acceptor::new(settings.identity(LISTENER), job, false),
            checks_user: settings.secret.is_none(),
        })
    }

    /// Reads available bytes, without blocking. Reads no byte beyond the frame that changes the state.
    ///
    /// # Errors
    /// Reason to close the connection.
    pub fn step(&mut self) -> std::result::Result<IncomingStep, &'static str> {
        if let Some(tls) = &self.undecided {
            match begin_tls(&mut self.stream, tls) {
                Ok(()) => self.undecided = None,
                Err(None) => return Ok(IncomingStep::Pending),
                Err(Some(why)) => return Err(why),
            }
        }
        let mut bytes = [0; MAX_INCOMING_FRAME];
        loop {
            if let Some(frame) = self.parser.next().map_err(|malformed| malformed.0)? {
                match self.receive(&frame)? {
                    IncomingStep::Pending => continue,
                    step => return Ok(step),
                }
            }
            let missing = self.parser.missing_bytes().min(bytes.len());
            match self.stream.read(&mut bytes[..missing]) {
                Ok(0) => return Err("the connection was closed during the handshake"),
                Ok(count) => self.parser.feed(bytes.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return Ok(IncomingStep::Pending);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) if self.stream.failure().is_some() => {
                    return Err("its TLS handshake failed");
                }
                Err(_) => return Err("the connection failed during the handshake"),
            }
        }
    }

    fn receive(&mut self, frame: &[u8]) -> std::result::Result<IncomingStep, &'static str> {
        if let Some(token) = stream_token(frame) {
            return match (self.stream.has_tls(), self.has_payload_tls) {
                (true, false) => Err("a data connection with TLS, without WEFT_TLS_PAYLOADS here"),
                (false, true) => Err("a data connection without TLS, with WEFT_TLS_PAYLOADS here"),
                _ => token.map(IncomingStep::Stream),
            };
        }
        if self.demands_tls && !self.stream.has_tls() {
            // Best effort: the dialer may have disconnected.
            let _ = self.stream.write_all(&Refusal::TlsDemanded.frame());
            return Err("it does not use TLS");
        }
        match self.acceptor.receive(frame) {
            Ok(AcceptorStep::Send(frame)) => {
                self.stream.write_all(&frame).map_err(|_| "the response could not be sent")?;
                Ok(IncomingStep::Pending)
            }
            Ok(AcceptorStep::Authenticated { details, .. }) => {
                if self.checks_user {
                    self.check_user()?;
                }
                Ok(IncomingStep::Authenticated(details))
            }
            Err(HandshakeError::Reject(refusal)) => {
                // Best effort: the dialer may have disconnected.
                let _ = self.stream.write_all(&refusal.frame());
                Err(match refusal {
                    Refusal::Version(_) => "it uses another version of the pair protocol",
                    Refusal::WrongSecret => "it has another secret",
                    _ => "it is not a dialer of a pair",
                })
            }
            Err(HandshakeError::Malformed(malformed)) => Err(malformed.0),
            Err(_) => Err("the handshake failed"),
        }
    }

    fn check_user(&mut self) -> std::result::Result<(), &'static str> {
        match neighbour::check(self.stream.tcp()) {
            Ok(()) => Ok(()),
            // The dialer tries again.
            Err(Stranger::Exhausted(_)) => Err(SHORTAGE),
            Err(Stranger::Gone(_)) => Err("the connection was closed during the handshake"),
            Err(_) => {
                let refusal = Refusal::OtherUser(neighbour::own_user());
                // Best effort: the dialer may have disconnected.
                let _ = self.stream.write_all(&refusal.frame());
                Err(OTHER_USER)
            }
        }
    }

    /// Admits the authenticated connection.
    ///
    /// # Errors
    /// The system's.
    pub fn admit(self, settings: &PairSettings) -> Result<PairControl> {
        let IncomingConnection { _guard, stream, mut parser, acceptor, .. } = self;
        parser.set_limit(MAX_FRAME);
        let failed = |source| super::socket::descriptor_error("setting up a connection", source);
        let mut socket =
            FrameSocket::new(stream, parser, settings.silence_timeout).map_err(failed)?;
        // Both registrations are for the same descriptor: this one must be dropped before the other.
        drop(_guard);
        if let Some(frame) = acceptor.welcome() {
            socket.send(&frame).map_err(failed)?;
        }
        Ok(PairControl::new(socket, LISTENER, settings))
    }

    /// This end's address; unspecified if the connection has ended.
    pub fn local_address(&self) -> IpAddr {
        let local = self.stream.tcp().local_addr();
        local.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |address| address.ip().to_canonical())
    }

    /// A further connection's stream.
    pub fn into_stream(self) -> MaybeTlsStream {
        self.stream.for_data()
    }
}

/// Begins TLS if the first byte belongs to TLS. `None`: no byte has arrived.
fn begin_tls(
    stream: &mut MaybeTlsStream,
    tls: &Tls,
) -> std::result::Result<(), Option<&'static str>> {
    let mut first = [0];
    match stream.tcp().peek(&mut first) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Err(None)
        }
        Ok(1) if first[0] == tls::FIRST_BYTE => match tls.accept() {
            Some(session) => {
                stream.begin(session);
                Ok(())
            }
            None => {
                // Best effort: the dialer may have disconnected. Unread bytes would reset the connection, and with it
                // the alert.
                let _ = stream.read(&mut [0; MAX_INCOMING_FRAME]);
                let _ = stream.write_all(&tls::REFUSAL_ALERT);
                Err(Some("it uses TLS, and this listener has no certificate (WEFT_TLS_CERT)"))
            }
        },
        // The read that follows finds an end or an error.
        _ => Ok(()),
    }
}

impl AsFd for IncomingConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
