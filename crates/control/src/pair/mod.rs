//! Control connection of a pair group, which two processes form at run time.
//!
//! The dialer authenticates with the handshake of the control plane under a separate magic, so ports of
//! groups and ports of pairs reject each other's dialers. The connection then carries exchanges, poison and
//! leave in the messages of the control plane (`docs/wire-format-control.md`). One thread of the process
//! serves all of its pairs.
//!
//! - this file: settings, and the dialer
//! - `incoming.rs`: accepted connection before its handshake has ended
//! - `control.rs`: [`PairControl`], the handle; `state.rs`: its socket and its clocks
//! - `protocol.rs`: effects of messages on a pair, without sockets
//! - `heartbeat.rs`: the thread for all pairs of a process: heartbeats, and detection of silence
//! - `socket.rs`: frames over a non-blocking socket

mod control;
mod heartbeat;
mod incoming;
pub(crate) mod protocol;
mod socket;
mod state;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tls_tests;

pub use control::PairControl;
pub use incoming::{IncomingConnection, IncomingStep};
pub use socket::{descriptor_error, nonblocking_listener};

use crate::config::{TLS_PAYLOADS, is_loopback, pair_from_env, split_address};
use crate::connect::{check_source, connect};
use crate::deadline::Deadline;
use crate::dial::{self, DialTarget};
use crate::handshake::{Identity, PAIR_MAGIC};
use crate::resolve::resolve;
use crate::secret::Key;
pub use crate::tls::MaybeTlsStream;
use crate::tls::Tls;
use crate::wire::FrameWriter;
use crate::{Error, Interrupt, Operation, Rank, Result, Secret};
use socket::FrameSocket;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

/// Oldest and newest version of the pair protocol of this build.
pub const PAIR_VERSIONS: (u16, u16) = (3, 3);
/// Rank of the listening end.
pub const LISTENER: Rank = Rank(0);
/// Rank of the connecting end.
pub const CONNECTOR: Rank = Rank(1);
/// Longest details of an end, in bytes.
pub const MAX_DETAILS: usize = 3 << 10;
/// Token by which a further connection to the listener belongs to a pair that is being formed.
pub type StreamToken = [u8; 16];

/// Pause before the route to a listener is looked up again.
const ROUTE_PAUSE: Duration = Duration::from_millis(50);

/// Kind of the only frame of a further connection.
const STREAM: u8 = 0x90;
const HINT: &str = "check that its process listens, and that the address can be reached from here";

/// Settings of one end of a pair.
#[derive(Clone)]
pub struct PairSettings {
    /// `host:port` of the listener.
    pub address: String,
    /// Address of this host to connect from, for policy routing by source address; the system chooses by default.
    pub source: Option<IpAddr>,
    /// Shared secret. Required unless the address is the loopback of this host.
    pub secret: Option<Secret>,
    /// Host identity: ends with equal ones share memory.
    pub host_id: String,
    /// Silence timeout: the peer counts as lost after this time without bytes of its process or
    /// acknowledgements of its host. The two ends may have different ones.
    pub silence_timeout: Duration,
    /// Interrupt check, called several times a second during waits: `true` ends them with
    /// [`Error::Interrupted`].
    pub interrupt: Option<Interrupt>,
    /// TLS of the control connection and, with [`Tls::with_payloads`], of payloads over tcp.
    pub tls: Tls,
}

impl PairSettings {
    /// Settings with the secret, host identity and silence timeout of the environment (`WEFT_SECRET`,
    /// `WEFT_SECRET_FILE`, `WEFT_HOST_ID`, `WEFT_SILENCE_TIMEOUT`), and its TLS (`WEFT_TLS_CERT`, `WEFT_TLS_KEY`,
    /// `WEFT_TLS_CA`, `WEFT_TLS_PAYLOADS`).
    ///
    /// # Errors
    /// [`Error::Variable`], [`Error::SecretFile`] and [`Error::TlsFile`] for an invalid variable.
    pub fn from_env(address: &str) -> Result<PairSettings> {
        let (secret, host_id, silence_timeout, tls) = pair_from_env()?;
        let address = address.to_owned();
        let interrupt = None;
        Ok(PairSettings { address, source: None, secret, host_id, silence_timeout, interrupt, tls })
    }

    /// Host and port of the address. Off loopback, a secret is required.
    ///
    /// # Errors
    /// [`Error::Variable`] for an invalid address; [`Error::PairSecretMissing`] without a secret off loopback.
    pub fn endpoint(&self) -> Result<(String, u16)> {
        let (host, port) = split_address("address", &self.address, 0)?;
        if self.secret.is_none() && !is_loopback(&host) {
            return Err(Error::PairSecretMissing { address: self.address.clone() });
        }
        Ok((host, port))
    }

    /// Address of this host from which the listener is reached: `source`, or the system's choice, which is retried until
    /// the listener's name resolves and has a route. No packet is sent.
    ///
    /// # Errors
    /// As [`PairSettings::endpoint`]; [`Error::Variable`] for a source from which the listener cannot be reached;
    /// [`Error::Resolve`] and [`Error::System`] without an address and a route within `timeout`; [`Error::Interrupted`].
    pub fn local_address(&self, timeout: Duration) -> Result<IpAddr> {
        let (host, port) = self.endpoint()?;
        if let Some(source) = self.source {
            self.check_source()?;
            return Ok(source);
        }
        let (deadline, name) =
            (Deadline::after(timeout, self.interrupt.clone()), Operation::Connect.name());
        loop {
            let last = match resolve(&host, port.max(1), &deadline, name)? {
                Ok(addresses) => match route(&addresses) {
                    Ok(local) => return Ok(local),
                    Err(error) => descriptor_error("finding the route to a listener", error),
                },
                Err(error) => Error::Resolve { host: host.clone(), problem: error.to_string() },
            };
            deadline.pause(ROUTE_PAUSE, name)?;
            if deadline.expired() {
                return Err(last);
            }
        }
    }

    /// Checks that a listener with TLS of payloads has a certificate.
    ///
    /// # Errors
    /// [`Error::Variable`].
    pub fn check_listener_tls(&self) -> Result<()> {
        let (problem, remedy) =
            ("this listener has no certificate", "set WEFT_TLS_CERT and WEFT_TLS_KEY");
        refuse_payload_tls(self.tls.lacks_certificate(), problem, remedy)
    }

    fn check_dialer_tls(&self) -> Result<()> {
        let (problem, remedy) = ("this connector has no authorities", "set WEFT_TLS_CA");
        refuse_payload_tls(self.tls.lacks_authorities(), problem, remedy)
    }

    fn check_source(&self) -> Result<()> {
        let Some(source) = self.source else { return Ok(()) };
        let listener = self.endpoint()?.0.parse::<IpAddr>().ok();
        let problem = match (source, listener) {
            _ if source.is_unspecified() || source.is_multicast() => "it is not one address",
            (IpAddr::V6(source), _) if source.is_unicast_link_local() => {
                "it is link-local, which needs the name of an interface"
            }
            (_, Some(to)) if to.is_ipv4() != source.is_ipv4() => {
                "the listener's address is of another family"
            }
            (_, Some(to)) if source.is_loopback() && !to.is_loopback() => {
                "the listener cannot be reached from loopback"
            }
            _ => match check_source(source) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                    "this host does not have it"
                }
                Err(error) => {
                    return Err(descriptor_error("binding a connection to its source", error));
                }
            },
        };
        Err(Error::Variable {
            variable: "source".into(),
            value: source.to_string(),
            problem: problem.into(),
            remedy: "use one of this host's addresses (`ip address`), or leave it out".into(),
        })
    }

    fn identity(&self, rank: Rank) -> Identity {
        let (key, versions) = (Key::new(self.secret.as_ref()), PAIR_VERSIONS);
        Identity { rank, world_size: 2, key, versions, magic: PAIR_MAGIC }
    }
}

/// Address of this host from which the first of these that has a route is reached.
fn route(addresses: &[SocketAddr]) -> io::Result<IpAddr> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for address in addresses {
        let any: IpAddr = match address {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let local = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(address)?;
            socket.local_addr()
        });
        match local {
            Ok(local) => return Ok(local.ip()),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn refuse_payload_tls(lacks: bool, problem: &str, remedy: &str) -> Result<()> {
    if !lacks {
        return Ok(());
    }
    Err(Error::Variable {
        variable: TLS_PAYLOADS.into(),
        value: "1".into(),
        problem: problem.into(),
        remedy: remedy.into(),
    })
}

/// Connects to a listener, with retries until it accepts, refuses for good, or `timeout` has passed.
/// `details` describe this end and travel with its proof.
///
/// # Errors
/// Those of [`PairSettings::endpoint`]; [`Error::WrongSecret`]; [`Error::WrongVersion`];
/// [`Error::Rendezvous`] after the timeout; [`Error::Interrupted`]; [`Error::Variable`] for TLS of payloads without
/// authorities, and for a source from which the listener cannot be reached.
pub fn dial(settings: &PairSettings, details: &[u8], timeout: Duration) -> Result<PairControl> {
    settings.check_dialer_tls()?;
    settings.check_source()?;
    let (host, port) = settings.endpoint()?;
    if port == 0 {
        return Err(Error::Variable {
            variable: "address".into(),
            value: settings.address.clone(),
            problem: "it has no port".into(),
            remedy: "use the address of the listener".into(),
        });
    }
    let tls = settings.tls.clone();
    let source = settings.source;
    let target = DialTarget { rank: LISTENER, host, port, source, hint: HINT, tls };
    let deadline = Deadline::after(timeout, settings.interrupt.clone());
    let mut details = |_: &TcpStream| Ok(details.to_vec());
    let identity = settings.identity(CONNECTOR);
    let dialed = dial::dial(&target, &identity, None, &mut details, &deadline)?;
    let dial::AuthenticatedConnection { stream, parser, .. } = dialed;
    let socket = FrameSocket::new(stream, parser, settings.silence_timeout)
        .map_err(|source| descriptor_error("setting up a connection", source))?;
    Ok(PairControl::new(socket, CONNECTOR, settings))
}

/// Opens a further connection to the listener at `address`, for the pair of `token`, with TLS if the settings have it
/// for payloads. The inner error is the system's, or that of TLS.
///
/// # Errors
/// [`Error::Interrupted`]; those of [`PairSettings::endpoint`]; [`Error::Variable`] for TLS of payloads without authorities.
pub fn dial_stream(
    settings: &PairSettings,
    address: SocketAddr,
    token: &StreamToken,
    timeout: Duration,
) -> Result<io::Result<MaybeTlsStream>> {
    settings.check_dialer_tls()?;
    let deadline = Deadline::after(timeout, settings.interrupt.clone());
    let name = Operation::Connect.name();
    let stream = match connect(&address, settings.source, &deadline, name)? {
        Ok(stream) => stream,
        Err(error) => return Ok(Err(error)),
    };
    let mut stream = match settings.tls.is_of_payloads() {
        true => settings.tls.dial(stream, &settings.endpoint()?.0)?,
        false => MaybeTlsStream::plain(stream),
    };
    if let Err(error) = stream.complete_handshake(&deadline, name)? {
        return Ok(Err(error));
    }
    Ok(send_token(stream, token))
}

/// Only frame of a further connection.
pub(crate) fn stream_frame(token: &StreamToken) -> Vec<u8> {
    FrameWriter::new(STREAM).bytes(&PAIR_MAGIC).bytes(token).finish()
}

/// Token in the frame of a further connection; `None` for frames of another kind.
pub(crate) fn stream_token(frame: &[u8]) -> Option<std::result::Result<StreamToken, &'static str>> {
    let rest = frame.strip_prefix(&[STREAM])?;
    let token = rest.strip_prefix(&PAIR_MAGIC).and_then(|token| token.try_into().ok());
    Some(token.ok_or("a connection of a pair without a token"))
}

fn send_token(mut stream: MaybeTlsStream, token: &StreamToken) -> io::Result<MaybeTlsStream> {
    use io::Write as _;
    stream.tcp().set_nodelay(true)?;
    // The empty send buffer of a new socket holds it.
    stream.write_all(&stream_frame(token))?;
    stream.tcp().set_nonblocking(true)?;
    Ok(stream.for_data())
}
