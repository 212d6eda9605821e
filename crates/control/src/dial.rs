//! Connecting to a rank that may not be there yet.

use crate::config::is_loopback;
use crate::connecting::connect;
use crate::deadline::Deadline;
use crate::handshake::{Dialer, DialerStep, Failure, Identity, Job, Refusal};
use crate::reception::HANDSHAKE_TIME;
use crate::resolve::resolve;
use crate::wire::{MAX_FRAME, MAX_UNPROVED_FRAME, Parser};
use crate::{Error, Rank, Result};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How often this rank may be told that it is there already before it believes it.
const DUPLICATES: u32 = 4;
const CONNECT_TIME: Duration = Duration::from_secs(2);
const WAITING_FOR_RANKS: &str = "the other ranks to join";

/// Who is dialed, and where.
pub(crate) struct Target {
    pub rank: Rank,
    pub host: String,
    pub port: u16,
    /// What to look at if it does not answer.
    pub hint: &'static str,
}

/// The hint for ranks of a group.
pub(crate) const HINT: &str = "check that it runs, and that its address can be reached from here \
                               (WEFT_ADDR and WEFT_PORT for rank 0, WEFT_ADVERTISE for any other)";

/// A connection whose other side has proved itself.
pub(crate) struct Connection {
    pub stream: TcpStream,
    pub parser: Parser,
    pub job: Job,
}

/// Makes what a rank tells about itself, once it has a connection.
pub(crate) type MakeDetails<'a> = &'a mut dyn FnMut(&TcpStream) -> Result<Vec<u8>>;

/// Dials until the target answers, refuses for good, or the deadline has passed.
pub(crate) fn dial(
    target: &Target,
    identity: &Identity,
    job: Option<Job>,
    details: MakeDetails,
    deadline: &Deadline,
) -> Result<Connection> {
    let mut pause = FIRST_PAUSE;
    let mut duplicates = 0;
    loop {
        deadline.check(WAITING_FOR_RANKS)?;
        let mut unresolved = false;
        let last = match attempt(target, identity, job, details, deadline) {
            Ok(connection) => return Ok(connection),
            // An attempt of this rank that broke off may be known there for a moment.
            Err(Attempt::Final(error @ Error::DuplicateRank { .. })) if duplicates < DUPLICATES => {
                duplicates += 1;
                error.to_string()
            }
            Err(Attempt::Final(error)) => return Err(error),
            Err(Attempt::Again(problem)) => problem,
            Err(Attempt::Unresolved(problem)) => {
                unresolved = true;
                problem
            }
        };
        log::debug!("{} at {}:{}: {last}", target.rank, target.host, target.port);
        deadline.pause(pause, WAITING_FOR_RANKS)?;
        if deadline.expired() && unresolved {
            return Err(Error::Resolve { host: target.host.clone(), problem: last });
        }
        if deadline.expired() {
            return Err(Error::Bootstrap {
                missing: vec![target.rank],
                waited: deadline.waited(),
                last: Some(format!("{} at {}:{}: {last}", target.rank, target.host, target.port)),
                hint: target.hint,
            });
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Why one attempt failed.
enum Attempt {
    /// Trying again will not help.
    Final(Error),
    Again(String),
    /// The name has no address now. It may get one once its host is up.
    Unresolved(String),
}

impl From<Error> for Attempt {
    fn from(error: Error) -> Attempt {
        Attempt::Final(error)
    }
}

fn attempt(
    target: &Target,
    identity: &Identity,
    job: Option<Job>,
    details: MakeDetails,
    deadline: &Deadline,
) -> std::result::Result<Connection, Attempt> {
    let addresses = match resolve(&target.host, target.port, deadline, WAITING_FOR_RANKS)? {
        Ok(addresses) => addresses,
        Err(error) => return Err(Attempt::Unresolved(error.to_string())),
    };
    let mut problem = "the name has no address".to_string();
    for address in &addresses {
        match connect(address, &deadline.at_most(CONNECT_TIME), WAITING_FOR_RANKS)? {
            // Another address of the same name may be the right one.
            Ok(stream) => match shake(stream, target, identity, job, details, deadline) {
                Err(Attempt::Again(answer)) => problem = answer,
                done => return done,
            },
            Err(error) => problem = error.to_string(),
        }
    }
    Err(Attempt::Again(problem + &name_of_loopback(&target.host, &addresses)))
}

/// What to add where a name that should mean another host means this one.
fn name_of_loopback(host: &str, addresses: &[SocketAddr]) -> String {
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

fn shake(
    mut stream: TcpStream,
    target: &Target,
    identity: &Identity,
    job: Option<Job>,
    details: MakeDetails,
    deadline: &Deadline,
) -> std::result::Result<Connection, Attempt> {
    // A port chosen by the system for the dialing side may be the very one that is dialed.
    if stream.local_addr().ok() == stream.peer_addr().ok() {
        return Err(Attempt::Again("nobody listens there yet".into()));
    }
    let details = details(&stream)?;
    let again = |error: std::io::Error| Attempt::Again(error.to_string());
    stream.set_nodelay(true).map_err(again)?;
    stream.set_write_timeout(Some(HANDSHAKE_TIME)).map_err(again)?;
    let fail = |failure| give_up(failure, target, identity);
    let (mut dialer, hello) =
        Dialer::start(identity.clone(), target.rank, job, details).map_err(fail)?;
    stream.write_all(&hello).map_err(again)?;
    let mut parser = Parser::new(MAX_UNPROVED_FRAME);
    let deadline = deadline.at_most(HANDSHAKE_TIME);
    loop {
        let frame = match read_frame(&mut stream, &mut parser, &deadline)? {
            Read::Frame(frame) => frame,
            Read::Late => return Err(Attempt::Again("it accepts but does not answer".into())),
            Read::Ended(problem) => return Err(Attempt::Again(problem)),
        };
        match dialer.receive(&frame).map_err(fail)? {
            DialerStep::Send(frame) => stream.write_all(&frame).map_err(again)?,
            DialerStep::Welcome(job) => {
                parser.set_limit(MAX_FRAME);
                return Ok(Connection { stream, parser, job });
            }
        }
    }
}

fn give_up(failure: Failure, target: &Target, identity: &Identity) -> Attempt {
    let (peer, address) = (target.rank, format!("{}:{}", target.host, target.port));
    Attempt::Final(match failure {
        Failure::Refused(Refusal::WrongSecret) => Error::WrongSecret { peer, address },
        Failure::Refused(Refusal::Version(theirs)) => {
            Error::WrongVersion { peer, address, ours: identity.versions.1, theirs }
        }
        Failure::Refused(Refusal::WorldSize(theirs)) => {
            Error::WrongWorldSize { peer, address, ours: identity.world_size, theirs }
        }
        Failure::Refused(Refusal::DuplicateRank) => Error::DuplicateRank { rank: identity.rank },
        Failure::Refused(Refusal::NotExpected) | Failure::Refuse(_) => {
            return Attempt::Again("another job's rank answers there".into());
        }
        Failure::WrongRank(rank) => return Attempt::Again(format!("{rank} answers there")),
        Failure::Malformed(malformed) => {
            return Attempt::Again(format!("what answers there is not Weft ({})", malformed.0));
        }
        Failure::NoRandomness => {
            return Attempt::Again("the system has no random bytes".into());
        }
    })
}

/// What came of reading a frame.
pub(crate) enum Read {
    Frame(Vec<u8>),
    /// The deadline has passed.
    Late,
    /// The connection ended, and how.
    Ended(String),
}

/// Reads one frame from a blocking stream.
pub(crate) fn read_frame(
    stream: &mut TcpStream,
    parser: &mut Parser,
    deadline: &Deadline,
) -> Result<Read> {
    let mut bytes = [0; 4096];
    loop {
        match parser.next() {
            Ok(Some(frame)) => return Ok(Read::Frame(frame)),
            Ok(None) => {}
            Err(malformed) => {
                return Ok(Read::Ended(format!("what answers is not Weft ({})", malformed.0)));
            }
        }
        deadline.check(WAITING_FOR_RANKS)?;
        if deadline.expired() {
            return Ok(Read::Late);
        }
        let slice = deadline.slice().max(Duration::from_millis(1));
        if let Err(error) = stream.set_read_timeout(Some(slice)) {
            return Ok(Read::Ended(error.to_string()));
        }
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(Read::Ended("it closed the connection".into())),
            Ok(count) => parser.feed(bytes.get(..count).unwrap_or_default()),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                _ => return Ok(Read::Ended(error.to_string())),
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
        let text = name_of_loopback("node1", &debian);
        assert!(text.contains("127.0.1.1") && text.contains("WEFT_ADDR"), "{text}");
        assert_eq!(name_of_loopback("127.0.1.1", &debian), "");
        let both = [debian[0], SocketAddr::from(([10, 0, 0, 1], 1))];
        assert_eq!(name_of_loopback("node1", &both), "");
        assert_eq!(name_of_loopback("node1", &[]), "");
    }
}
