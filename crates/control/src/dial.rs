//! Dialer: connects to a rank, with retries until it listens.

use crate::config::is_loopback;
use crate::connect::connect;
use crate::deadline::Deadline;
use crate::handshake::{Dialer, DialerStep, HandshakeError, Identity, JobId, Refusal};
use crate::rank_listener::HANDSHAKE_TIMEOUT;
use crate::resolve::resolve;
use crate::tls::{MaybeTlsStream, Tls};
use crate::wire::{FrameParser, MAX_FRAME, MAX_UNAUTHENTICATED_FRAME};
use crate::{Error, Rank, Result};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Refusals as a duplicate rank before the dialer gives up.
const MAX_DUPLICATE_REFUSALS: u32 = 4;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const JOINING: &str = "the other ranks to join";

/// Rank to dial, and its address.
pub(crate) struct DialTarget {
    pub rank: Rank,
    pub host: String,
    pub port: u16,
    /// Address to connect from, instead of the system's choice.
    pub source: Option<IpAddr>,
    /// Remedy named by the error if it does not respond.
    pub hint: &'static str,
    /// TLS, without authorities for none.
    pub tls: Tls,
}

/// Remedy for ranks of a group.
pub(crate) const HINT: &str = "check that it runs, and that its address can be reached from here \
                               (WEFT_ADDR and WEFT_PORT for rank 0, WEFT_ADVERTISE for any other)";

/// Connection that has passed the handshake.
pub(crate) struct AuthenticatedConnection {
    pub stream: MaybeTlsStream,
    pub parser: FrameParser,
    pub job: JobId,
}

/// Builds this rank's details for the handshake, once it has a connection.
pub(crate) type MakeDetails<'a> = &'a mut dyn FnMut(&TcpStream) -> Result<Vec<u8>>;

/// Dials until the target accepts, refuses for good, or the deadline has passed.
pub(crate) fn dial(
    target: &DialTarget,
    identity: &Identity,
    job: Option<JobId>,
    details: MakeDetails,
    deadline: &Deadline,
) -> Result<AuthenticatedConnection> {
    let mut pause = FIRST_PAUSE;
    let mut duplicates = 0;
    loop {
        deadline.check(JOINING)?;
        let mut unresolved = false;
        let last = match attempt(target, identity, job, details, deadline) {
            Ok(connection) => return Ok(connection),
            // The target may still hold an earlier attempt of this rank.
            Err(AttemptError::Final(error @ Error::DuplicateRank { .. }))
                if duplicates < MAX_DUPLICATE_REFUSALS =>
            {
                duplicates += 1;
                error.to_string()
            }
            Err(AttemptError::Final(error)) => return Err(error),
            Err(AttemptError::Retry(problem)) => problem,
            Err(AttemptError::Unresolved(problem)) => {
                unresolved = true;
                problem
            }
        };
        log::debug!("{} at {}:{}: {last}", target.rank, target.host, target.port);
        deadline.pause(pause, JOINING)?;
        if deadline.expired() && unresolved {
            return Err(Error::Resolve { host: target.host.clone(), problem: last });
        }
        if deadline.expired() {
            return Err(Error::Rendezvous {
                missing: vec![target.rank],
                waited: deadline.waited(),
                last: Some(format!("{} at {}:{}: {last}", target.rank, target.host, target.port)),
                hint: target.hint,
            });
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Failure of one attempt.
enum AttemptError {
    /// Permanent: a retry has the same outcome.
    Final(Error),
    Retry(String),
    /// The name does not resolve now. It may once its host is up.
    Unresolved(String),
}

impl From<Error> for AttemptError {
    fn from(error: Error) -> AttemptError {
        AttemptError::Final(error)
    }
}

fn attempt(
    target: &DialTarget,
    identity: &Identity,
    job: Option<JobId>,
    details: MakeDetails,
    deadline: &Deadline,
) -> std::result::Result<AuthenticatedConnection, AttemptError> {
    let addresses = match resolve(&target.host, target.port, deadline, JOINING)? {
        Ok(addresses) => addresses,
        Err(error) => return Err(AttemptError::Unresolved(error.to_string())),
    };
    let mut problem = match target.source {
        Some(_) => "the name has no address of the source's family".to_string(),
        None => "the name has no address".to_string(),
    };
    let is_reached =
        |to: &&SocketAddr| target.source.is_none_or(|source| source.is_ipv4() == to.is_ipv4());
    for address in addresses.iter().filter(is_reached) {
        match connect(address, target.source, &deadline.at_most(CONNECT_TIMEOUT), JOINING)? {
            // Another address of the name may be the right one.
            Ok(stream) => match handshake(stream, target, identity, job, details, deadline) {
                Err(AttemptError::Retry(answer)) => problem = answer,
                done => return done,
            },
            Err(error) => problem = error.to_string(),
        }
    }
    Err(AttemptError::Retry(problem + &loopback_note(&target.host, &addresses)))
}

/// Note for a host name that resolves to loopback here.
fn loopback_note(host: &str, addresses: &[SocketAddr]) -> String {
    match addresses {
        [first, ..] if !is_loopback(host) && addresses.iter().all(|a| a.ip().is_loopback()) => {
            format!(
                "; on this host the name is {}, its loopback: unless rank 0 is on this host, correct \
                 /etc/hosts or set WEFT_ADDR to an address of rank 0's host",
                first.ip()
            )
        }
        _ => String::new(),
    }
}

fn handshake(
    stream: TcpStream,
    target: &DialTarget,
    identity: &Identity,
    job: Option<JobId>,
    details: MakeDetails,
    deadline: &Deadline,
) -> std::result::Result<AuthenticatedConnection, AttemptError> {
    // TCP self-connect: the ephemeral source port may equal the dialed port.
    if stream.local_addr().ok() == stream.peer_addr().ok() {
        return Err(AttemptError::Retry("no listener there yet".into()));
    }
    let details = details(&stream)?;
    let retry = |error: std::io::Error| AttemptError::Retry(error.to_string());
    stream.set_nodelay(true).map_err(retry)?;
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(retry)?;
    let fail = |failure| attempt_error(failure, target, identity);
    let (mut dialer, hello) =
        Dialer::start(identity.clone(), target.rank, job, details).map_err(fail)?;
    let mut stream = target.tls.dial(stream, &target.host)?;
    stream.write_all(&hello).map_err(retry)?;
    let mut parser = FrameParser::new(MAX_UNAUTHENTICATED_FRAME);
    let deadline = deadline.at_most(HANDSHAKE_TIMEOUT);
    loop {
        let frame = match read_frame(&mut stream, &mut parser, &deadline)? {
            FrameRead::Frame(frame) => frame,
            FrameRead::TimedOut => {
                return Err(AttemptError::Retry("it accepts but sends no response".into()));
            }
            FrameRead::Closed(problem) => return Err(ended(&stream, target, problem)),
        };
        match dialer.receive(&frame).map_err(fail)? {
            DialerStep::Send(frame) => stream.write_all(&frame).map_err(retry)?,
            DialerStep::Welcome(job) => {
                parser.set_limit(MAX_FRAME);
                return Ok(AuthenticatedConnection { stream, parser, job });
            }
        }
    }
}

/// Error of a connection that ended in the handshake: final for an error of TLS.
fn ended(stream: &MaybeTlsStream, target: &DialTarget, problem: String) -> AttemptError {
    let Some(problem) = stream.failure() else { return AttemptError::Retry(problem) };
    let address = format!("{}:{}", target.host, target.port);
    AttemptError::Final(Error::Tls { address, problem: problem.into() })
}

fn attempt_error(
    failure: HandshakeError,
    target: &DialTarget,
    identity: &Identity,
) -> AttemptError {
    let (peer, address) = (target.rank, format!("{}:{}", target.host, target.port));
    AttemptError::Final(match failure {
        HandshakeError::Rejected(Refusal::WrongSecret) => Error::WrongSecret { peer, address },
        HandshakeError::Rejected(Refusal::Version(theirs)) => {
            Error::WrongVersion { peer, address, ours: identity.versions.1, theirs }
        }
        HandshakeError::Rejected(Refusal::WorldSize(theirs)) => {
            Error::WrongWorldSize { peer, address, ours: identity.world_size, theirs }
        }
        HandshakeError::Rejected(Refusal::TlsDemanded) => Error::TlsDemanded { address },
        HandshakeError::Rejected(Refusal::DuplicateRank) => {
            Error::DuplicateRank { rank: identity.rank }
        }
        HandshakeError::Rejected(Refusal::NotExpected) | HandshakeError::Reject(_) => {
            return AttemptError::Retry("a rank of another job listens there".into());
        }
        HandshakeError::WrongRank(rank) => {
            return AttemptError::Retry(format!("{rank} listens there"));
        }
        HandshakeError::Malformed(malformed) => {
            return AttemptError::Retry(format!(
                "the listener there is not Weft ({})",
                malformed.0
            ));
        }
        HandshakeError::NoRandomness => {
            return AttemptError::Retry("the system has no random bytes".into());
        }
    })
}

/// Outcome of reading a frame.
pub(crate) enum FrameRead {
    Frame(Vec<u8>),
    /// The deadline has passed.
    TimedOut,
    /// The connection ended, with its reason.
    Closed(String),
}

/// Reads one frame from a blocking stream.
pub(crate) fn read_frame(
    stream: &mut MaybeTlsStream,
    parser: &mut FrameParser,
    deadline: &Deadline,
) -> Result<FrameRead> {
    let mut bytes = [0; 4096];
    loop {
        match parser.next() {
            Ok(Some(frame)) => return Ok(FrameRead::Frame(frame)),
            Ok(None) => {}
            Err(malformed) => {
                return Ok(FrameRead::Closed(format!(
                    "the listener is not Weft ({})",
                    malformed.0
                )));
            }
        }
        deadline.check(JOINING)?;
        if deadline.expired() {
            return Ok(FrameRead::TimedOut);
        }
        let slice = deadline.slice().max(Duration::from_millis(1));
        if let Err(error) = stream.tcp().set_read_timeout(Some(slice)) {
            return Ok(FrameRead::Closed(error.to_string()));
        }
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(FrameRead::Closed("it closed the connection".into())),
            Ok(count) => parser.feed(bytes.get(..count).unwrap_or_default()),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                _ => return Ok(FrameRead::Closed(error.to_string())),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_loopback_is_pointed_out_and_loopback_itself_is_not() {
        let debian = [SocketAddr::from(([127, 0, 1, 1], 1))];
        let text = loopback_note("node1", &debian);
        assert!(text.contains("127.0.1.1") && text.contains("WEFT_ADDR"), "{text}");
        assert_eq!(loopback_note("127.0.1.1", &debian), "");
        let both = [debian[0], SocketAddr::from(([10, 0, 0, 1], 1))];
        assert_eq!(loopback_note("node1", &both), "");
        assert_eq!(loopback_note("node1", &[]), "");
    }
}
