//! Settings for one pair end.

use super::socket::descriptor_error;
use crate::config::{TLS_PAYLOADS, is_loopback, pair_from_env, split_address};
use crate::connect::check_source;
use crate::deadline::Deadline;
use crate::handshake::{Identity, PAIR_MAGIC};
use crate::resolve::resolve;
use crate::secret::Key;
use crate::tls::Tls;
use crate::{Error, Interrupt, Operation, Rank, Result, Secret};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

/// This build's oldest and newest pair protocol version.
pub const PAIR_VERSIONS: (u16, u16) = (4, 4);

/// Listening end's rank.
pub const LISTENER: Rank = Rank(0);

/// Connecting end's rank.
pub const CONNECTOR: Rank = Rank(1);

/// Pause before the route to a listener is looked up again.
const ROUTE_PAUSE: Duration = Duration::from_millis(50);

/// Settings for one pair end.
#[derive(Clone)]
pub struct PairSettings {
    /// Listener's `host:port`.
    pub address: String,
    /// This host's address to connect from, for example for policy routing by source address; the system chooses by
    /// default.
    pub source: Option<IpAddr>,
    /// Shared secret. Required unless the address is this host's loopback.
    pub secret: Option<Secret>,
    /// Host identity: ends with equal ones share memory.
    pub host_id: String,
    /// Silence timeout: the peer counts as lost after this time without bytes from the peer's process or
    /// acknowledgements from its host. The two ends may have different ones.
    pub silence_timeout: Duration,
    /// Interrupt check, called several times a second during waits: `true` ends them with
    /// [`Error::Interrupted`].
    pub interrupt: Option<Interrupt>,
    /// TLS on the control connection and, with [`Tls::with_payloads`], for payloads over tcp.
    pub tls: Tls,
}

impl PairSettings {
    /// Settings with the secret, host identity and silence timeout from the environment (`WEFT_SECRET`,
    /// `WEFT_SECRET_FILE`, `WEFT_HOST_ID`, `WEFT_SILENCE_TIMEOUT`), and TLS (`WEFT_TLS_CERT`, `WEFT_TLS_KEY`,
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

    /// Host and port in the address. Off loopback, a secret is required.
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

    /// This host's address that reaches the listener: `source`, or the system's choice, which is retried until
    /// the listener's name resolves and has a route. No packet is sent.
    ///
    /// # Errors
    /// As [`PairSettings::endpoint`]; [`Error::Variable`] for a source from which the listener cannot be reached;
    /// [`Error::PairResolve`] and [`Error::System`] without an address and a route within `timeout`; [`Error::Interrupted`].
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
                Err(error) => {
                    let (address, problem) = (self.address.clone(), error.to_string());
                    Error::PairResolve { address, problem }
                }
            };
            deadline.pause(ROUTE_PAUSE, name)?;
            if deadline.expired() {
                return Err(last);
            }
        }
    }

    /// Checks that a listener with payload TLS has a certificate.
    ///
    /// # Errors
    /// [`Error::Variable`].
    pub fn check_listener_tls(&self) -> Result<()> {
        let (problem, remedy) =
            ("this listener has no certificate", "set WEFT_TLS_CERT and WEFT_TLS_KEY");
        refuse_payload_tls(self.tls.lacks_certificate(), problem, remedy)
    }

    pub(super) fn check_dialer_tls(&self) -> Result<()> {
        let (problem, remedy) = ("this connector has no authorities", "set WEFT_TLS_CA");
        refuse_payload_tls(self.tls.lacks_authorities(), problem, remedy)
    }

    pub(super) fn check_source(&self) -> Result<()> {
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

    pub(super) fn identity(&self, rank: Rank) -> Identity {
        let (key, versions) = (Key::new(self.secret.as_ref()), PAIR_VERSIONS);
        Identity { rank, world_size: 2, key, versions, magic: PAIR_MAGIC }
    }
}

/// This host's address for the first of these addresses that has a route.
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
