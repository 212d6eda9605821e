//! Dialer: connections to a pair's listener.

use super::control::PairControl;
use super::settings::{CONNECTOR, LISTENER, PairSettings};
use super::socket::{FrameSocket, descriptor_error};
use super::stream_token::{StreamToken, stream_frame};
use crate::connect::connect;
use crate::deadline::Deadline;
use crate::dial::DialTarget;
use crate::tls::MaybeTlsStream;
use crate::{Error, Operation, Result, dial};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Connects to a listener, with retries until it accepts, refuses for good, or `timeout` has passed.
/// `details` describe this end and travel with the proof.
///
/// # Errors
/// Same as [`PairSettings::endpoint`]; [`Error::PairWrongSecret`]; [`Error::PairWrongVersion`];
/// [`Error::NoListener`] and [`Error::PairResolve`] after the timeout; [`Error::Interrupted`]; [`Error::Variable`] for
/// payload TLS without authorities, and for a source from which the listener cannot be reached.
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
    let target = DialTarget { rank: LISTENER, host, port, source, is_listener: true, tls };
    let deadline = Deadline::after(timeout, settings.interrupt.clone());
    let mut details = |_: &TcpStream| Ok(details.to_vec());
    let identity = settings.identity(CONNECTOR);
    let dialed = dial::dial(&target, &identity, None, &mut details, &deadline)?;
    let dial::AuthenticatedConnection { stream, parser, .. } = dialed;
    let socket = FrameSocket::new(stream, parser, settings.silence_timeout)
        .map_err(|source| descriptor_error("setting up a connection", source))?;
    Ok(PairControl::new(socket, CONNECTOR, settings))
}

/// Opens a further connection to the listener at `address`, for the pair with `token`, with TLS if the settings have it
/// for payloads. The inner error is the system's or TLS's.
///
/// # Errors
/// [`Error::Interrupted`]; same as [`PairSettings::endpoint`]; [`Error::Variable`] for payload TLS without authorities.
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

fn send_token(mut stream: MaybeTlsStream, token: &StreamToken) -> io::Result<MaybeTlsStream> {
    use io::Write as _;
    stream.tcp().set_nodelay(true)?;
    // A new socket's empty send buffer holds it.
    stream.write_all(&stream_frame(token))?;
    stream.tcp().set_nonblocking(true)?;
    Ok(stream.for_data())
}
