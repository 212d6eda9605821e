//! Where ranks come in: a listener that lets in those it expects and nobody else.
//!
//! Everything is one loop over sockets that do not block, so a stranger that dawdles, floods or
//! talks nonsense holds nobody up: it has [`HANDSHAKE_TIME`] and no more memory than its frames.

use crate::fork_guard::{self, Registration};
use crate::handshake::{Acceptor, AcceptorStep, Failure, Identity, Job, Refusal};
use crate::wire::{MAX_FRAME, MAX_UNPROVED_FRAME, Parser};
use crate::{Error, Rank, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long a handshake may take.
pub(crate) const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// How many unproved connections are kept besides one for each expected rank.
const SPARE_STRANGERS: usize = 128;
/// How many connections are accepted before those that are there are read, and the deadline checked.
const ACCEPTED_AT_ONCE: usize = 64;

/// A rank that has proved itself.
pub(crate) struct Arrival {
    pub rank: Rank,
    pub details: Vec<u8>,
    pub stream: TcpStream,
    pub parser: Parser,
}

pub(crate) struct Reception {
    _guard: Registration,
    listener: TcpListener,
    identity: Identity,
    job: Job,
    job_known: bool,
    expected: BTreeSet<Rank>,
    arrived: BTreeSet<Rank>,
    strangers: VecDeque<Stranger>,
    /// How many were turned away, by reason.
    refused: BTreeMap<&'static str, u64>,
}

struct Stranger {
    stream: TcpStream,
    parser: Parser,
    acceptor: Acceptor,
    since: Instant,
}

impl Reception {
    /// Ranks that dial for the first time do not know the job (`job_known` is false).
    pub(crate) fn new(
        listener: TcpListener,
        identity: Identity,
        job: Job,
        job_known: bool,
        expected: BTreeSet<Rank>,
    ) -> Result<Reception> {
        listener.set_nonblocking(true).map_err(Error::system("setting up the listener"))?;
        Ok(Reception {
            _guard: fork_guard::register(&listener),
            listener,
            identity,
            job,
            job_known,
            expected,
            arrived: BTreeSet::new(),
            strangers: VecDeque::new(),
            refused: BTreeMap::new(),
        })
    }

    /// Those who have not arrived.
    pub(crate) fn missing(&self) -> Vec<Rank> {
        self.expected.difference(&self.arrived).copied().collect()
    }

    /// A rank that had arrived is gone again: it may come once more.
    pub(crate) fn forget(&mut self, rank: Rank) {
        self.arrived.remove(&rank);
    }

    /// Serves the sockets until a rank arrives or `patience` is over, however many connect meanwhile.
    pub(crate) fn serve(&mut self, patience: Duration) -> Result<Vec<Arrival>> {
        let began = Instant::now();
        let mut arrivals = Vec::new();
        loop {
            let left = patience.saturating_sub(began.elapsed());
            if left.is_zero() || !arrivals.is_empty() {
                return Ok(arrivals);
            }
            self.sleep(left)?;
            self.accept();
            for _ in 0..self.strangers.len() {
                let Some(mut stranger) = self.strangers.pop_front() else { break };
                match self.advance(&mut stranger) {
                    Ok(None) => self.strangers.push_back(stranger),
                    Ok(Some((rank, details))) => arrivals.push(self.admit(rank, details, stranger)),
                    Err(reason) => self.count(reason),
                }
            }
        }
    }

    fn sleep(&self, patience: Duration) -> Result<()> {
        let mut sockets = vec![PollFd::new(&self.listener, PollFlags::IN)];
        sockets.extend(self.strangers.iter().map(|s| PollFd::new(&s.stream, PollFlags::IN)));
        let next_expiry = self.strangers.iter().map(|s| s.since + HANDSHAKE_TIME).min();
        let until_expiry = next_expiry.map(|at| at.saturating_duration_since(Instant::now()));
        let patience = until_expiry.map_or(patience, |expiry| patience.min(expiry));
        match poll(&mut sockets, Some(&timespec(patience))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Error::system("waiting for connections")(error)),
        }
    }

    /// Takes in some of those that have connected. A flood has more at every turn.
    fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => {
                    // Out of descriptors, most likely; a stranger's time will be up soon.
                    self.count("the connection could not be accepted");
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            };
            if stream.set_nonblocking(true).and(stream.set_nodelay(true)).is_err() {
                continue;
            }
            if self.strangers.len() >= self.expected.len() + SPARE_STRANGERS {
                self.strangers.pop_front();
                self.count("too many connections at once");
            }
            self.strangers.push_back(Stranger {
                stream,
                parser: Parser::new(MAX_UNPROVED_FRAME),
                acceptor: Acceptor::new(self.identity.clone(), self.job, self.job_known),
                since: Instant::now(),
            });
        }
    }

    /// Reads what a stranger sent. The error is why it is turned away.
    fn advance(
        &self,
        stranger: &mut Stranger,
    ) -> std::result::Result<Option<(Rank, Vec<u8>)>, &'static str> {
        if stranger.since.elapsed() > HANDSHAKE_TIME {
            return Err("the handshake took too long");
        }
        let mut bytes = [0; MAX_UNPROVED_FRAME];
        match stranger.stream.read(&mut bytes) {
            Ok(0) => return Err("the connection was closed during the handshake"),
            Ok(count) => stranger.parser.feed(bytes.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(None),
            Err(_) => return Err("the connection failed during the handshake"),
        }
        while let Some(frame) = stranger.parser.next().map_err(|malformed| malformed.0)? {
            match stranger.acceptor.receive(&frame) {
                Ok(AcceptorStep::Send(frame)) => {
                    stranger
                        .stream
                        .write_all(&frame)
                        .map_err(|_| "the answer could not be sent")?;
                }
                Ok(AcceptorStep::Proved { rank, details }) => {
                    let refusal = if !self.expected.contains(&rank) {
                        Refusal::NotExpected
                    } else if self.arrived.contains(&rank) {
                        Refusal::DuplicateRank
                    } else {
                        return Ok(Some((rank, details)));
                    };
                    let _ = stranger.stream.write_all(&refusal.frame());
                    return Err(reason(refusal));
                }
                Err(Failure::Refuse(refusal)) => {
                    let _ = stranger.stream.write_all(&refusal.frame());
                    return Err(reason(refusal));
                }
                Err(Failure::Malformed(malformed)) => return Err(malformed.0),
                Err(_) => return Err("the handshake failed"),
            }
        }
        Ok(None)
    }

    fn admit(&mut self, rank: Rank, details: Vec<u8>, stranger: Stranger) -> Arrival {
        let Stranger { mut stream, mut parser, acceptor, .. } = stranger;
        self.arrived.insert(rank);
        parser.set_limit(MAX_FRAME);
        // Whether the welcome gets through shows when the connection is used.
        let _ = acceptor.welcome().map(|frame| stream.write_all(&frame));
        Arrival { rank, details, stream, parser }
    }

    fn count(&mut self, reason: &'static str) {
        let count = self.refused.entry(reason).or_default();
        *count += 1;
        if *count == 1 {
            log::warn!("a connection was turned away: {reason}");
        }
    }
}

impl Drop for Reception {
    fn drop(&mut self) {
        for (reason, count) in &self.refused {
            log::info!("connections turned away while ranks came in: {count} ({reason})");
        }
    }
}

fn reason(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::Version(_) => "it speaks another wire version",
        Refusal::WrongSecret => "it holds another secret",
        Refusal::WorldSize(_) => "it was started with another world size",
        Refusal::DuplicateRank => "its rank has joined already",
        Refusal::NotExpected => "it belongs to another job, or its rank is not expected here",
    }
}

pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WIRE_VERSIONS;
    use crate::secret::Key;

    #[test]
    fn one_turn_takes_in_a_part_of_a_flood_and_the_oldest_make_room() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let identity = Identity {
            rank: Rank(0),
            world_size: 2,
            key: Key::new(None),
            versions: WIRE_VERSIONS,
            magic: crate::handshake::GROUP_MAGIC,
        };
        let mut reception =
            Reception::new(listener, identity, [0; 16], false, [Rank(1)].into()).unwrap();
        let mut flood = Vec::new();
        for turn in 1..=4 {
            // More than a turn takes in, fewer than the system queues.
            flood.extend((0..100).map(|_| TcpStream::connect(address).unwrap()));
            reception.accept();
            let kept = (turn * ACCEPTED_AT_ONCE).min(1 + SPARE_STRANGERS);
            assert_eq!(reception.strangers.len(), kept, "turn {turn}");
            // What is left over would fill the queue.
            (0..100 - ACCEPTED_AT_ONCE).for_each(|_| drop(reception.listener.accept().unwrap()));
        }
    }
}
