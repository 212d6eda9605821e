//! TLS on control connections: certificates, and a stream with or without TLS.
//!
//! Only pairs use it. The dialer verifies the listener's certificate against its authorities; the shared secret
//! authenticates both ends inside the connection, as without TLS. TLS 1.3 only.

use crate::deadline::Deadline;
use crate::{Error, Result};
use rustix::net::{self, SendAncillaryBuffer, SendFlags};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};
use std::io::{self, BufReader, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// First byte on a TLS connection: the content type of the first record, a handshake. No first pair frame, whose
/// length precedes it, begins with it.
pub(crate) const FIRST_BYTE: u8 = 0x16;
/// Fatal alert `handshake_failure`, without encryption: the answer from a listener without a certificate.
pub(crate) const REFUSAL_ALERT: [u8; 7] = [0x15, 3, 3, 0, 2, 2, 40];

/// Largest PEM file: 4 MiB, twenty times the public authority list.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// TLS on pair control connections. A clone shares the certificates.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    server: Option<Arc<ServerConfig>>,
    client: Option<Arc<ClientConfig>>,
    of_payloads: bool,
}

impl Tls {
    /// Listener TLS: it refuses dialers without TLS. PEM files: its certificate, followed by the ones that issued
    /// it; its private key.
    ///
    /// # Errors
    /// [`Error::TlsFile`].
    pub fn with_certificate(mut self, certificate: &Path, key: &Path) -> Result<Tls> {
        let certificates = certificates(certificate)?;
        let private = PrivateKeyDer::from_pem_slice(&read(key)?)
            .map_err(|error| file(key, error.to_string()))?;
        let config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|config| {
                config.with_no_client_auth().with_single_cert(certificates, private)
            });
        let mut config = config.map_err(|error| file(certificate, error.to_string()))?;
        // Connections are not resumed.
        config.send_tls13_tickets = 0;
        self.server = Some(Arc::new(config));
        Ok(self)
    }

    /// Dialer TLS: it connects only with TLS, to listeners with a certificate issued by an authority in this PEM
    /// file for the dialed name or address.
    ///
    /// # Errors
    /// [`Error::TlsFile`].
    pub fn with_authorities(mut self, authorities: &Path) -> Result<Tls> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(authorities)? {
            roots.add(certificate).map_err(|error| file(authorities, error.to_string()))?;
        }
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| file(authorities, error.to_string()))?;
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.resumption = rustls::client::Resumption::disabled();
        self.client = Some(Arc::new(config));
        Ok(self)
    }

    /// TLS for payloads over tcp, too. Both ends must have it.
    pub fn with_payloads(mut self) -> Tls {
        self.of_payloads = true;
        self
    }

    /// True with payload TLS.
    pub fn is_of_payloads(&self) -> bool {
        self.of_payloads
    }

    /// True if payloads need TLS that a dialer without authorities does not have.
    pub(crate) fn lacks_authorities(&self) -> bool {
        self.of_payloads && self.client.is_none()
    }

    /// True if payloads need TLS that a listener without a certificate does not have.
    pub(crate) fn lacks_certificate(&self) -> bool {
        self.of_payloads && self.server.is_none()
    }

    /// True for a listener with a certificate.
    pub(crate) fn is_demanded(&self) -> bool {
        self.server.is_some()
    }

    /// A dialer's stream to this host, with TLS if there are authorities.
    pub(crate) fn dial(&self, stream: TcpStream, host: &str) -> Result<MaybeTlsStream> {
        let Some(config) = &self.client else { return Ok(MaybeTlsStream::plain(stream)) };
        let failed = |problem: String| Error::Tls { address: host.into(), problem };
        let name = ServerName::try_from(host.to_owned()).map_err(|e| failed(e.to_string()))?;
        let session = ClientConnection::new(config.clone(), name);
        let session = session.map_err(|error| failed(error.to_string()))?;
        Ok(MaybeTlsStream {
            session: Some(Box::new(session.into())),
            ..MaybeTlsStream::plain(stream)
        })
    }

    /// Stream for a listener whose dialer began with TLS; `None` without a certificate.
    pub(crate) fn accept(&self) -> Option<Box<Connection>> {
        let session = ServerConnection::new(self.server.clone()?).ok()?;
        Some(Box::new(session.into()))
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let text = read(path)?;
    let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| file(path, error.to_string()))?;
    if found.is_empty() {
        return Err(file(path, "it has no certificate in the PEM format".into()));
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    weft_environment::read(path, MAX_FILE_BYTES).map_err(|error| file(path, error.to_string()))
}

fn file(path: &Path, problem: String) -> Error {
    Error::TlsFile { path: path.display().to_string(), problem }
}

/// Encrypted bytes that a data connection reads at once, and plain bytes that wait encrypted in it.
const DATA_BYTES: usize = 256 << 10;

/// Socket with or without TLS, blocking or not.
pub struct MaybeTlsStream {
    /// Without a buffer, except in a data connection with TLS.
    stream: BufReader<TcpStream>,
    session: Option<Box<Connection>>,
    /// TLS error that ended the connection.
    failure: Option<String>,
}

impl MaybeTlsStream {
    /// Stream without TLS.
    pub fn plain(stream: TcpStream) -> MaybeTlsStream {
        let stream = BufReader::with_capacity(0, stream);
        MaybeTlsStream { stream, session: None, failure: None }
    }

    /// Stream with buffers for payloads, with no unread byte.
    pub(crate) fn for_data(self) -> MaybeTlsStream {
        let MaybeTlsStream { stream, mut session, failure } = self;
        let stream = stream.into_inner();
        let bytes = if session.is_some() { DATA_BYTES } else { 0 };
        if let Some(session) = &mut session {
            session.set_buffer_limit(Some(DATA_BYTES));
        }
        MaybeTlsStream { stream: BufReader::with_capacity(bytes, stream), session, failure }
    }

    /// Completes the TLS handshake on a blocking socket. The inner error is the connection's, or `TimedOut`.
    pub(crate) fn complete_handshake(
        &mut self,
        deadline: &Deadline,
        operation: &'static str,
    ) -> Result<io::Result<()>> {
        while self.session.as_ref().is_some_and(|session| session.is_handshaking()) {
            deadline.check(operation)?;
            if deadline.expired() {
                return Ok(Err(ErrorKind::TimedOut.into()));
            }
            let slice = deadline.slice().max(Duration::from_millis(1));
            let step = self.tcp().set_read_timeout(Some(slice));
            match step.and_then(|()| self.send()).and_then(|()| self.receive()) {
                Ok(()) => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Ok(Err(error)),
            }
        }
        Ok(self.send())
    }

    /// Begins TLS on a stream before any byte is read.
    pub(crate) fn begin(&mut self, session: Box<Connection>) {
        self.session = Some(session);
    }

    /// True with TLS.
    pub fn has_tls(&self) -> bool {
        self.session.is_some()
    }

    /// The socket.
    pub fn tcp(&self) -> &TcpStream {
        self.stream.get_ref()
    }

    /// The socket in a stream without TLS.
    pub fn into_tcp(self) -> TcpStream {
        self.stream.into_inner()
    }

    /// TLS error that ended the connection.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// True if encrypted bytes wait for room in the socket.
    pub fn has_unsent(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.wants_write())
    }

    /// True if bytes that have left the socket are unread.
    pub fn has_unread(&mut self) -> bool {
        let buffered = !self.stream.buffer().is_empty();
        let Some(session) = &mut self.session else { return buffered };
        // The next read reports an error.
        let waits = |state: rustls::IoState| state.plaintext_bytes_to_read() > 0;
        buffered || session.process_new_packets().map_or(true, waits)
    }

    /// Announces that this direction ends, and closes it.
    pub(crate) fn shut_down(&mut self) {
        if let Some(session) = &mut self.session {
            session.send_close_notify();
        }
        // Both fail if the connection has ended already.
        let _ = self.send();
        let _ = self.tcp().shutdown(std::net::Shutdown::Write);
    }

    /// Receives encrypted bytes, and sends what they demand.
    fn receive(&mut self) -> io::Result<()> {
        let MaybeTlsStream { stream, session: Some(session), .. } = self else { return Ok(()) };
        // The reader reports an end, except in the handshake.
        if session.read_tls(stream)? == 0 && session.is_handshaking() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        if let Err(error) = session.process_new_packets() {
            self.failure = Some(error.to_string());
            // The alert; the error below is the one that counts.
            let _ = self.send();
            return Err(io::Error::new(ErrorKind::InvalidData, error));
        }
        let in_handshake = session.is_handshaking();
        match self.send() {
            Err(error) if in_handshake => Err(error),
            // What has arrived is whole; the next write reports the error.
            _ => Ok(()),
        }
    }

    /// Sends encrypted bytes, as far as the socket accepts them.
    fn send(&mut self) -> io::Result<()> {
        let MaybeTlsStream { stream, session: Some(session), .. } = self else { return Ok(()) };
        while session.wants_write() {
            match session.write_tls(&mut Sender(stream.get_ref())) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Socket whose writes raise no signal after the connection ended: the standard library's do if they are
/// vectored.
struct Sender<'a>(&'a TcpStream);

impl Write for Sender<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut ancillary = SendAncillaryBuffer::default();
        Ok(net::sendmsg(self.0, bytes, &mut ancillary, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for MaybeTlsStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some(session) = &mut self.session else { return self.stream.read(bytes) };
            match session.reader().read(bytes) {
                // Messages have an explicit end: a truncated stream lacks it.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                read => return read,
            }
            self.receive()?;
        }
    }
}

impl Write for MaybeTlsStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let Some(session) = &mut self.session else {
                return self.stream.get_mut().write(bytes);
            };
            let taken = session.writer().write(bytes)?;
            self.send()?;
            if taken > 0 || bytes.is_empty() {
                return Ok(taken);
            }
            // Only a full socket has an event once there is room.
            if self.has_unsent() {
                return Err(ErrorKind::WouldBlock.into());
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}

impl AsFd for MaybeTlsStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tcp().as_fd()
    }
}

impl std::fmt::Debug for MaybeTlsStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MaybeTlsStream { session, failure, .. } = self;
        let mut out = f.debug_struct("MaybeTlsStream");
        out.field("tcp", self.tcp()).field("tls", &session.is_some()).field("failure", failure);
        out.finish()
    }
}
