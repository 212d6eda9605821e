//! Dialer: connects to a rank, with retries until it listens.

use crate::config::is_loopback;
use crate::connect::connect;
use crate::deadline::Deadline;
use crate::handshake::{
    Dialer, DialerStep, HANDSHAKE_TIMEOUT, HandshakeError, Identity, JobId, Refusal,
};
use crate::neighbour::{self, Stranger};
use crate::resolve::{host_and_port, resolve};
use crate::tls::{MaybeTlsStream, Tls};
use crate::wire::{FrameParser, MAX_FRAME, MAX_UNAUTHENTICATED_FRAME};
use crate::{Error, Rank, Result, limits};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Refusals as a duplicate rank before the dialer gives up.
const MAX_DUPLICATE_REFUSALS: u32 = 4;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which a rank tries to connect without a descriptor or a local port.
pub(crate) const EXHAUSTED_TIME: Duration = Duration::from_secs(1);
const JOINING: &str = "the other ranks to join";

/// Rank to dial, and its address.
pub(crate) struct DialTarget {
    pub rank: Rank,
    pub host: String,
    pub port: u16,
    /// Address to connect from, instead of the system's choice.
    pub source: Option<IpAddr>,
    /// Pair listener: errors name the address, and no rank.
    pub is_listener: bool,
    /// TLS, without authorities for none.
    pub tls: Tls,
}

/// Remedy for ranks in a group.
const HINT: &str = "check that it runs, and that its address can be reached from here \
                               (WEFT_ADDR and WEFT_PORT for rank 0, WEFT_ADVERTISE for any other)";

impl DialTarget {
    /// Address as it is written: an IPv6 address in brackets.
    fn address(&self) -> String {
        host_and_port(&self.host, self.port)
    }

    /// Error at the deadline, with the last attempt's failure.
    fn late(&self, waited: Duration, unresolved: bool, problem: String) -> Error {
        let (address, host) = (self.address(), self.host.clone());
        match (self.is_listener, unresolved) {
            (true, true) => Error::PairResolve { address, problem },
            (true, false) => Error::NoListener { address, waited, problem },
            (false, true) => Error::Resolve { host, problem },
            (false, false) => Error::Rendezvous {
                missing: vec![self.rank],
                waited,
                last: Some(format!("{} at {address}: {problem}", self.rank)),
                hint: HINT,
            },
        }
    }
}

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
    let mut exhausted_since = None;
    loop {
        deadline.check(JOINING)?;
        let mut unresolved = false;
        let last = match attempt(target, identity, job, details, deadline) {
            Ok(connection) => return Ok(connection),
            // The target may still hold this rank's earlier attempt.
            Err(AttemptError::Final(error @ Error::DuplicateRank { .. }))
                if duplicates < MAX_DUPLICATE_REFUSALS =>
            {
                duplicates += 1;
                error.to_string()
            }
            Err(AttemptError::Final(error)) => return Err(error),
            Err(AttemptError::Retry(problem)) => {
                exhausted_since = None;
                problem
            }
            Err(AttemptError::Exhausted(source)) => {
                let since = *exhausted_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= EXHAUSTED_TIME {
                    return Err(exhausted(source));
                }
                source.to_string()
            }
            Err(AttemptError::Unresolved(problem)) => {
                unresolved = true;
                problem
            }
        };
        log::debug!("{} at {}: {last}", target.rank, target.address());
        deadline.pause(pause, JOINING)?;
        if deadline.expired() {
            return Err(target.late(deadline.waited(), unresolved, last));
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// True if a connection lacks a descriptor, memory or a local port, rather than an answer.
fn is_exhausted(error: &std::io::Error, to: &SocketAddr) -> bool {
    // A host without IPv6 reports the same for every address in that family.
    let lacks_port = to.is_ipv4() && error.raw_os_error() == Some(libc::EADDRNOTAVAIL);
    limits::is_exhausted(error) || lacks_port
}

fn exhausted(source: std::io::Error) -> Error {
    const DOING: &str = "connecting to the other ranks";
    if limits::is_exhausted(&source) {
        Error::System { doing: DOING, source }
    } else {
        Error::Ports { doing: DOING }
    }
}

/// A single attempt's failure.
enum AttemptError {
    /// Permanent: a retry has the same outcome.
    Final(Error),
    Retry(String),
    /// This process or host has run out of a resource.
    Exhausted(std::io::Error),
    /// The name does not resolve now. It may once the host is up.
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
    let mut lacking = None;
    let is_reached =
        |to: &&SocketAddr| target.source.is_none_or(|source| source.is_ipv4() == to.is_ipv4());
    for address in addresses.iter().filter(is_reached) {
        match connect(address, target.source, &deadline.at_most(CONNECT_TIMEOUT), JOINING)? {
            // Another address for the name may be the right one.
            Ok(stream) => match handshake(stream, target, identity, job, details, deadline) {
                Err(AttemptError::Retry(answer)) => problem = answer,
                done => return done,
            },
            Err(error) if is_exhausted(&error, address) => lacking = Some(error),
            Err(error) => problem = error.to_string(),
        }
    }
    if let Some(error) = lacking {
        return Err(AttemptError::Exhausted(error));
    }
    let note = if target.is_listener { "".into() } else { loopback_note(&target.host, &addresses) };
    Err(AttemptError::Retry(problem + &note))
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
                check_user(&stream, target, identity)?;
                parser.set_limit(MAX_FRAME);
                return Ok(AuthenticatedConnection { stream, parser, job });
            }
        }
    }
}

/// Checks the user behind the listener's process, in place of a secret.
fn check_user(
    stream: &MaybeTlsStream,
    target: &DialTarget,
    identity: &Identity,
) -> std::result::Result<(), AttemptError> {
    if !identity.key.is_public() {
        return Ok(());
    }
    let problem = match neighbour::check(stream.tcp()) {
        Ok(()) => return Ok(()),
        Err(Stranger::Gone(problem)) => return Err(AttemptError::Retry(problem)),
        Err(Stranger::Exhausted(error)) => return Err(AttemptError::Exhausted(error.into())),
        Err(Stranger::User(user)) => format!("it is a process of user {user}"),
        Err(Stranger::Unknown(reason)) => format!("its user is unknown ({reason})"),
    };
    let (peer, address) = (target.rank, target.address());
    Err(AttemptError::Final(Error::OtherUser { peer, address, problem }))
}

/// Error for a connection that ended in the handshake: final for a TLS error.
fn ended(stream: &MaybeTlsStream, target: &DialTarget, problem: String) -> AttemptError {
    let Some(problem) = stream.failure() else { return AttemptError::Retry(problem) };
    AttemptError::Final(Error::Tls { address: target.address(), problem: problem.into() })
}

fn attempt_error(
    failure: HandshakeError,
    target: &DialTarget,
    identity: &Identity,
) -> AttemptError {
    let (peer, address) = (target.rank, target.address());
    AttemptError::Final(match failure {
        HandshakeError::Rejected(Refusal::WrongSecret) if target.is_listener => {
            Error::PairWrongSecret { address }
        }
        HandshakeError::Rejected(Refusal::Version(theirs)) if target.is_listener => {
            Error::PairWrongVersion { address, ours: identity.versions.1, theirs }
        }
        HandshakeError::Rejected(Refusal::WrongSecret) => Error::WrongSecret { peer, address },
        HandshakeError::Rejected(Refusal::Version(theirs)) => {
            Error::WrongVersion { peer, address, ours: identity.versions.1, theirs }
        }
        HandshakeError::Rejected(Refusal::WorldSize(theirs)) => {
            Error::WrongWorldSize { peer, address, ours: identity.world_size, theirs }
        }
        HandshakeError::Rejected(Refusal::TlsDemanded) => Error::TlsDemanded { address },
        HandshakeError::Rejected(Refusal::OtherUser(theirs)) => {
            let ours = neighbour::own_user();
            let problem = match theirs == ours {
                true => format!("it could not find out that this process is of its user {theirs}"),
                false => format!("it is a process of user {theirs}, and this one of user {ours}"),
            };
            Error::OtherUser { peer, address, problem }
        }
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

/// Frame read outcome.
pub(crate) enum FrameRead {
    Frame(Vec<u8>),
    /// The deadline has passed.
    TimedOut,
    /// The connection ended, with the reason.
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
