//! Control connection of a pair group: two processes that meet at run time.
//!
//! The dialler proves itself with the handshake of the control plane, under a magic of its own, so that a
//! port of a group and a port of pairs turn each other's diallers away. The connection then stays: it
//! carries the two ends' exchanges, a poison with its cause, and the goodbye, in the messages of the
//! control plane (`docs/wire-format-control.md`). One thread of the process serves all of its pairs.
//!
//! - this file: settings, and dialling
//! - `guest.rs`: an accepted connection whose other end has not proved itself
//! - `control.rs`: [`PairControl`], the connection of a formed pair; `state.rs`: its socket and its clocks
//! - `protocol.rs`: what messages do to a pair, without sockets
//! - `heartbeat.rs`: the one thread for all pairs of a process: heartbeats, and peers that are silent
//! - `socket.rs`: frames over a socket that does not block

mod control;
mod guest;
mod heartbeat;
pub(crate) mod protocol;
mod socket;
mod state;
#[cfg(test)]
mod tests;

pub use control::PairControl;
pub use guest::{Guest, GuestStep};
pub use socket::{name_of_descriptors, nonblocking_listener};

use crate::config::{is_loopback, pair_from_env, split_address};
use crate::connecting::connect;
use crate::deadline::Deadline;
use crate::dial::{self, Target};
use crate::handshake::{Identity, PAIR_MAGIC};
use crate::secret::Key;
use crate::wire::Writer;
use crate::{Error, Interrupt, Operation, Rank, Result, Secret};
use socket::FrameSocket;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// The oldest and newest version of the pair protocol of this build.
pub const PAIR_VERSIONS: (u16, u16) = (2, 2);
/// The rank of the listening end.
pub const LISTENER: Rank = Rank(0);
/// The rank of the connecting end.
pub const CONNECTOR: Rank = Rank(1);
/// The longest description that an end gives of itself, in bytes.
pub const MAX_DETAILS: usize = 3 << 10;
/// Proof that a further connection to the listener belongs to a pair that is being formed.
pub type StreamToken = [u8; 16];

/// First byte of the one frame of a further connection.
const STREAM: u8 = 0x90;
const HINT: &str = "check that its process listens, and that the address can be reached from here";

/// The settings that both ends of a pair have.
#[derive(Clone)]
pub struct Settings {
    /// `host:port` of the listener.
    pub address: String,
    /// The shared secret. Needed unless the address is of this host's loopback.
    pub secret: Option<Secret>,
    /// Ranks of equal host identity share memory.
    pub host_id: String,
    /// Time without a sign of life of the peer's process, or without an acknowledgement of its host, after
    /// which the peer counts as lost. The two ends may have different ones.
    pub silence_timeout: Duration,
    /// Asked several times a second by calls that wait: `true` ends them with [`Error::Interrupted`].
    pub interrupt: Option<Interrupt>,
}

impl Settings {
    /// Settings with the secret, host identity and silence timeout of the environment (`WEFT_SECRET`,
    /// `WEFT_SECRET_FILE`, `WEFT_HOST_ID`, `WEFT_SILENCE_TIMEOUT`).
    ///
    /// # Errors
    /// [`Error::Variable`] and [`Error::SecretFile`] for a variable that cannot be used.
    pub fn from_env(address: &str) -> Result<Settings> {
        let (secret, host_id, silence_timeout) = pair_from_env()?;
        let address = address.to_owned();
        Ok(Settings { address, secret, host_id, silence_timeout, interrupt: None })
    }

    /// The host and port of the address, checked against the secret.
    ///
    /// # Errors
    /// [`Error::Variable`] if it is no address; [`Error::PairSecretMissing`] without a secret off loopback.
    pub fn endpoint(&self) -> Result<(String, u16)> {
        let (host, port) = split_address("address", &self.address, 0)?;
        if self.secret.is_none() && !is_loopback(&host) {
            return Err(Error::PairSecretMissing { address: self.address.clone() });
        }
        Ok((host, port))
    }

    fn identity(&self, rank: Rank) -> Identity {
        let (key, versions) = (Key::new(self.secret.as_ref()), PAIR_VERSIONS);
        Identity { rank, world_size: 2, key, versions, magic: PAIR_MAGIC }
    }
}

/// Connects to a listener, retrying until it answers, refuses for good, or `timeout` has passed.
/// `details` describe this end and reach the listener with the proof.
///
/// # Errors
/// Those of [`Settings::endpoint`]; [`Error::WrongSecret`]; [`Error::WrongVersion`];
/// [`Error::Bootstrap`] after the timeout; [`Error::Interrupted`].
pub fn dial(settings: &Settings, details: &[u8], timeout: Duration) -> Result<PairControl> {
    let (host, port) = settings.endpoint()?;
    if port == 0 {
        return Err(Error::Variable {
            variable: "address".into(),
            value: settings.address.clone(),
            problem: "it has no port".into(),
            remedy: "use the address of the listener".into(),
        });
    }
    let target = Target { rank: LISTENER, host, port, hint: HINT };
    let deadline = Deadline::after(timeout, settings.interrupt.clone());
    let mut details = |_: &TcpStream| Ok(details.to_vec());
    let identity = settings.identity(CONNECTOR);
    let made = dial::dial(&target, &identity, None, &mut details, &deadline)?;
    let dial::Connection { stream, parser, .. } = made;
    let socket = FrameSocket::new(stream, parser, settings.silence_timeout)
        .map_err(|source| name_of_descriptors("setting up a connection", source))?;
    Ok(PairControl::new(socket, CONNECTOR, settings))
}

/// A further connection to the listener at `address`, for the pair that was given `token`. The inner error is
/// the system's.
///
/// # Errors
/// [`Error::Interrupted`].
pub fn dial_stream(
    address: SocketAddr,
    token: &StreamToken,
    timeout: Duration,
    interrupt: Option<Interrupt>,
) -> Result<std::io::Result<TcpStream>> {
    let deadline = Deadline::after(timeout, interrupt);
    let connected = connect(&address, &deadline, Operation::Connect.name())?;
    Ok(connected.and_then(|stream| introduce(stream, token)))
}

/// The one frame of a further connection.
pub(crate) fn stream_frame(token: &StreamToken) -> Vec<u8> {
    Writer::new(STREAM).bytes(&PAIR_MAGIC).bytes(token).finish()
}

/// The token of a further connection's frame; `None` if the frame is of another kind.
pub(crate) fn stream_token(frame: &[u8]) -> Option<std::result::Result<StreamToken, &'static str>> {
    let rest = frame.strip_prefix(&[STREAM])?;
    let token = rest.strip_prefix(&PAIR_MAGIC).and_then(|token| token.try_into().ok());
    Some(token.ok_or("a connection of a pair without a token"))
}

fn introduce(mut stream: TcpStream, token: &StreamToken) -> std::io::Result<TcpStream> {
    use std::io::Write as _;
    stream.set_nodelay(true)?;
    // A fresh socket has room for it.
    stream.write_all(&stream_frame(token))?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}
