//! Who may join: both sides prove that they hold the secret, over fresh numbers of both.
//!
//! ```text
//! dialer                                     acceptor
//!   hello: versions, ranks, world size, nonce  ->
//!                       <-  challenge: version, rank, nonce        (or refusal)
//!   proof: details, code over all of the above ->
//!                       <-  welcome: job, code over all of it      (or refusal)
//! ```
//!
//! The dialer proves itself first, so that a stranger who connects learns nothing that the secret
//! went into. A recorded handshake is of no use, since the acceptor's nonce is new each time.

use crate::Rank;
use crate::secret::{Key, PROOF_BYTES, random};
use crate::wire::{LENGTH_BYTES, Malformed, Reader, Writer};

/// First bytes of a hello to a rank of a group.
pub(crate) const GROUP_MAGIC: Magic = *b"WEFTCTRL";
/// First bytes of a hello to the listener of pair groups.
pub(crate) const PAIR_MAGIC: Magic = *b"WEFTPAIR";
const HELLO: u8 = 0x80;
const CHALLENGE: u8 = 0x81;
const PROOF: u8 = 0x82;
const WELCOME: u8 = 0x83;
const REFUSAL: u8 = 0x84;
const DIALER: &str = "weft control dialer";
const ACCEPTOR: &str = "weft control acceptor";

/// A random number that rank 0 draws for each job, so that ranks of different jobs never mix.
pub(crate) type Job = [u8; 16];
type Nonce = [u8; 32];
/// Names the protocol of a port. It is part of what both codes cover, so no proof serves two protocols.
pub(crate) type Magic = [u8; 8];

/// What one side is, whichever side it is.
#[derive(Clone)]
pub(crate) struct Identity {
    pub rank: Rank,
    pub world_size: u32,
    pub key: Key,
    /// The oldest and the newest wire version.
    pub versions: (u16, u16),
    pub magic: Magic,
}

/// Why a side was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// No version in common; the newest of the side that refuses.
    Version(u16),
    WrongSecret,
    /// The world size of the side that refuses.
    WorldSize(u32),
    DuplicateRank,
    /// Another job, or a rank that was not expected here.
    NotExpected,
}

impl Refusal {
    pub(crate) fn frame(self) -> Vec<u8> {
        let (code, value) = match self {
            Refusal::Version(newest) => (1, u32::from(newest)),
            Refusal::WrongSecret => (2, 0),
            Refusal::WorldSize(size) => (3, size),
            Refusal::DuplicateRank => (4, 0),
            Refusal::NotExpected => (5, 0),
        };
        Writer::new(REFUSAL).u8(code).u32(value).finish()
    }

    fn parse(mut reader: Reader) -> Result<Refusal, Malformed> {
        let (code, value) = (reader.u8()?, reader.u32()?);
        reader.end()?;
        Ok(match code {
            1 => Refusal::Version(u16::try_from(value).unwrap_or(u16::MAX)),
            2 => Refusal::WrongSecret,
            3 => Refusal::WorldSize(value),
            4 => Refusal::DuplicateRank,
            5 => Refusal::NotExpected,
            _ => return Err(Malformed("a refusal without a known reason")),
        })
    }
}

/// A handshake that came to nothing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The other side is not Weft, or breaks the protocol.
    Malformed(Malformed),
    /// This side refuses the other.
    Refuse(Refusal),
    /// The other side refused this one.
    Refused(Refusal),
    /// Another rank answered than the one that was dialed.
    WrongRank(Rank),
    /// The system has no random bytes.
    NoRandomness,
}

impl From<Malformed> for Failure {
    fn from(malformed: Malformed) -> Failure {
        Failure::Malformed(malformed)
    }
}

/// The side that connects.
pub(crate) struct Dialer {
    identity: Identity,
    target: Rank,
    details: Vec<u8>,
    /// The job to insist on, once it is known.
    job: Option<Job>,
    /// The hello's body.
    hello: Vec<u8>,
    /// What both codes are over, once the challenge has come.
    transcript: Option<Vec<u8>>,
}

/// What the dialer does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DialerStep {
    Send(Vec<u8>),
    Welcome(Job),
}

impl Dialer {
    /// The dialer and its first frame. `details` reach the acceptor with the proof, protected by it.
    pub(crate) fn start(
        identity: Identity,
        target: Rank,
        job: Option<Job>,
        details: Vec<u8>,
    ) -> Result<(Dialer, Vec<u8>), Failure> {
        let nonce: Nonce = random().map_err(|_| Failure::NoRandomness)?;
        let hello = Writer::new(HELLO)
            .bytes(&identity.magic)
            .u16(identity.versions.0)
            .u16(identity.versions.1)
            .u32(identity.rank.0)
            .u32(target.0)
            .u32(identity.world_size)
            .bytes(&job.unwrap_or_default())
            .bytes(&nonce)
            .finish();
        let body = hello.get(LENGTH_BYTES..).unwrap_or_default().to_vec();
        Ok((Dialer { identity, target, details, job, hello: body, transcript: None }, hello))
    }

    pub(crate) fn receive(&mut self, frame: &[u8]) -> Result<DialerStep, Failure> {
        let mut reader = Reader::new(frame);
        match (reader.u8()?, &self.transcript) {
            (REFUSAL, _) => Err(Failure::Refused(Refusal::parse(reader)?)),
            (CHALLENGE, None) => self.challenge(frame, reader),
            (WELCOME, Some(transcript)) => {
                let job: Job = reader.array()?;
                let proof: [u8; PROOF_BYTES] = reader.array()?;
                reader.end()?;
                if !self.identity.key.verify(ACCEPTOR, &[transcript, &self.details, &job], &proof) {
                    return Err(Failure::Refused(Refusal::WrongSecret));
                }
                if self.job.is_some_and(|expected| expected != job) {
                    return Err(Failure::Refused(Refusal::NotExpected));
                }
                Ok(DialerStep::Welcome(job))
            }
            _ => Err(Malformed("an answer that is no handshake").into()),
        }
    }

    fn challenge(&mut self, frame: &[u8], mut reader: Reader) -> Result<DialerStep, Failure> {
        let magic: [u8; 8] = reader.array()?;
        let (version, rank) = (reader.u16()?, reader.u32()?);
        let _nonce: Nonce = reader.array()?;
        reader.end()?;
        if magic != self.identity.magic {
            return Err(Malformed("what answers is not Weft").into());
        }
        let (oldest, newest) = self.identity.versions;
        if !(oldest..=newest).contains(&version) {
            return Err(Failure::Refused(Refusal::Version(version)));
        }
        if rank != self.target.0 {
            return Err(Failure::WrongRank(Rank(rank)));
        }
        let transcript = transcript(&self.hello, frame);
        let proof = self.identity.key.prove(DIALER, &[&transcript, &self.details]);
        self.transcript = Some(transcript);
        let frame = Writer::new(PROOF).bytes(&proof).bytes(&self.details).finish();
        Ok(DialerStep::Send(frame))
    }
}

/// The side that listens.
pub(crate) struct Acceptor {
    identity: Identity,
    job: Job,
    /// Whether a dialer must know the job already.
    job_known: bool,
    stage: Stage,
}

enum Stage {
    Hello,
    Proof { dialer: Rank, world_size: u32, transcript: Vec<u8> },
    Proved { transcript: Vec<u8>, details: Vec<u8> },
}

/// What the acceptor does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AcceptorStep {
    Send(Vec<u8>),
    /// The dialer is who it says. [`Acceptor::welcome`] lets it in.
    Proved {
        rank: Rank,
        details: Vec<u8>,
    },
}

impl Acceptor {
    pub(crate) fn new(identity: Identity, job: Job, job_known: bool) -> Acceptor {
        Acceptor { identity, job, job_known, stage: Stage::Hello }
    }

    pub(crate) fn receive(&mut self, frame: &[u8]) -> Result<AcceptorStep, Failure> {
        let mut reader = Reader::new(frame);
        match (reader.u8()?, &mut self.stage) {
            (HELLO, Stage::Hello) => self.hello(frame, reader),
            (PROOF, Stage::Proof { dialer, world_size, transcript }) => {
                let proof: [u8; PROOF_BYTES] = reader.array()?;
                let details = reader.rest();
                if !self.identity.key.verify(DIALER, &[transcript, details], &proof) {
                    return Err(Failure::Refuse(Refusal::WrongSecret));
                }
                if *world_size != self.identity.world_size {
                    return Err(Failure::Refuse(Refusal::WorldSize(self.identity.world_size)));
                }
                let (rank, details) = (*dialer, details.to_vec());
                let transcript = std::mem::take(transcript);
                self.stage = Stage::Proved { transcript, details: details.clone() };
                Ok(AcceptorStep::Proved { rank, details })
            }
            _ => Err(Malformed("this is no handshake").into()),
        }
    }

    fn hello(&mut self, frame: &[u8], mut reader: Reader) -> Result<AcceptorStep, Failure> {
        let magic: [u8; 8] = reader.array()?;
        if magic != self.identity.magic {
            return Err(Malformed("what dials is not Weft").into());
        }
        let (oldest, newest) = (reader.u16()?, reader.u16()?);
        let version = newest.min(self.identity.versions.1);
        if version < oldest.max(self.identity.versions.0) {
            return Err(Failure::Refuse(Refusal::Version(self.identity.versions.1)));
        }
        let (dialer, target, world_size) = (Rank(reader.u32()?), reader.u32()?, reader.u32()?);
        let job: Job = reader.array()?;
        let _nonce: Nonce = reader.array()?;
        reader.end()?;
        if target != self.identity.rank.0 || (self.job_known && job != self.job) {
            return Err(Failure::Refuse(Refusal::NotExpected));
        }
        let nonce: Nonce = random().map_err(|_| Failure::NoRandomness)?;
        let challenge = Writer::new(CHALLENGE)
            .bytes(&self.identity.magic)
            .u16(version)
            .u32(self.identity.rank.0)
            .bytes(&nonce)
            .finish();
        let body = challenge.get(LENGTH_BYTES..).unwrap_or_default();
        let transcript = transcript(frame, body);
        self.stage = Stage::Proof { dialer, world_size, transcript };
        Ok(AcceptorStep::Send(challenge))
    }

    /// The frame that lets a dialer in. `None` before it has proved itself.
    pub(crate) fn welcome(&self) -> Option<Vec<u8>> {
        let Stage::Proved { transcript, details } = &self.stage else { return None };
        let proof = self.identity.key.prove(ACCEPTOR, &[transcript, details, &self.job]);
        Some(Writer::new(WELCOME).bytes(&self.job).bytes(&proof).finish())
    }
}

/// What both sides have said before the codes.
fn transcript(hello: &[u8], challenge: &[u8]) -> Vec<u8> {
    [&(hello.len() as u32).to_le_bytes(), hello, challenge].concat()
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
