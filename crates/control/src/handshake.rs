//! Handshake: mutual proof with the shared secret (HMAC-SHA256) over fresh nonces from both sides.
//!
//! ```text
//! dialer                                     acceptor
//!   hello: versions, ranks, world size, nonce  ->
//!                       <-  challenge: version, rank, nonce        (or refusal)
//!   proof: details, code over all of the above ->
//!                       <-  welcome: job, code over all of it      (or refusal)
//! ```
//!
//! The dialer proves itself first, so the acceptor sends no code derived from the secret to an
//! unauthenticated peer. The acceptor's nonce is fresh for each connection, which prevents replay.

use crate::Rank;
use crate::secret::{Key, PROOF_BYTES, random_bytes};
use crate::wire::{FrameReader, FrameWriter, LENGTH_BYTES, Malformed};
use std::time::Duration;

/// Handshake time limit.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Hello magic for a rank in a group.
pub(crate) const GROUP_MAGIC: Magic = *b"WEFTCTRL";
/// Hello magic for a pair listener.
pub(crate) const PAIR_MAGIC: Magic = *b"WEFTPAIR";
const HELLO: u8 = 0x80;
const CHALLENGE: u8 = 0x81;
const PROOF: u8 = 0x82;
const WELCOME: u8 = 0x83;
const REFUSAL: u8 = 0x84;
const DIALER: &str = "weft control dialer";
const ACCEPTOR: &str = "weft control acceptor";

/// Random id that rank 0 draws for each job; it keeps ranks in different jobs apart.
pub(crate) type JobId = [u8; 16];
type Nonce = [u8; 32];
/// A port's protocol. Both codes cover it, so a proof is valid for one protocol only.
pub(crate) type Magic = [u8; 8];

/// One side's identity, dialer or acceptor.
#[derive(Clone)]
pub(crate) struct Identity {
    pub rank: Rank,
    pub world_size: u32,
    pub key: Key,
    /// Oldest and newest wire version.
    pub versions: (u16, u16),
    pub magic: Magic,
}

/// Reason for a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// No common version; the refusing side's newest.
    Version(u16),
    WrongSecret,
    /// The refusing side's world size.
    WorldSize(u32),
    DuplicateRank,
    /// Another job, or a rank that is not expected here.
    NotExpected,
    /// The refusing side demands TLS.
    TlsDemanded,
    /// There is no secret, and the refused process is not known to belong to the refusing side's
    /// user.
    OtherUser(u32),
}

impl Refusal {
    pub(crate) fn frame(self) -> Vec<u8> {
        let (code, value) = match self {
            Refusal::Version(newest) => (1, u32::from(newest)),
            Refusal::WrongSecret => (2, 0),
            Refusal::WorldSize(size) => (3, size),
            Refusal::DuplicateRank => (4, 0),
            Refusal::NotExpected => (5, 0),
            Refusal::TlsDemanded => (6, 0),
            Refusal::OtherUser(user) => (7, user),
        };
        FrameWriter::new(REFUSAL).u8(code).u32(value).finish()
    }

    fn parse(mut reader: FrameReader) -> Result<Refusal, Malformed> {
        let (code, value) = (reader.u8()?, reader.u32()?);
        reader.end()?;
        Ok(match code {
            1 => Refusal::Version(u16::try_from(value).unwrap_or(u16::MAX)),
            2 => Refusal::WrongSecret,
            3 => Refusal::WorldSize(value),
            4 => Refusal::DuplicateRank,
            5 => Refusal::NotExpected,
            6 => Refusal::TlsDemanded,
            7 => Refusal::OtherUser(value),
            _ => return Err(Malformed("a refusal of an unknown reason")),
        })
    }
}

/// Handshake failure.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HandshakeError {
    /// The other side is not Weft, or violates the protocol.
    Malformed(Malformed),
    /// This side refuses the other.
    Reject(Refusal),
    /// The other side refused this one.
    Rejected(Refusal),
    /// Another rank than the dialed one listens there.
    WrongRank(Rank),
    /// The system has no random bytes.
    NoRandomness,
}

impl From<Malformed> for HandshakeError {
    fn from(malformed: Malformed) -> HandshakeError {
        HandshakeError::Malformed(malformed)
    }
}

/// Connecting side.
pub(crate) struct Dialer {
    identity: Identity,
    target: Rank,
    details: Vec<u8>,
    /// Required job, if known.
    job: Option<JobId>,
    /// Hello body.
    hello: Vec<u8>,
    /// Bytes that both codes cover, once the challenge has arrived.
    transcript: Option<Vec<u8>>,
}

/// The dialer's next action.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DialerStep {
    Send(Vec<u8>),
    Welcome(JobId),
}

impl Dialer {
    /// Dialer and first frame. `details` travel with the proof, which covers them.
    pub(crate) fn start(
        identity: Identity,
        target: Rank,
        job: Option<JobId>,
        details: Vec<u8>,
    ) -> Result<(Dialer, Vec<u8>), HandshakeError> {
        let nonce: Nonce = random_bytes().map_err(|_| HandshakeError::NoRandomness)?;
        let hello = FrameWriter::new(HELLO)
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

    pub(crate) fn receive(&mut self, frame: &[u8]) -> Result<DialerStep, HandshakeError> {
        let mut reader = FrameReader::new(frame);
        match (reader.u8()?, &self.transcript) {
            (REFUSAL, _) => Err(HandshakeError::Rejected(Refusal::parse(reader)?)),
            (CHALLENGE, None) => self.challenge(frame, reader),
            (WELCOME, Some(transcript)) => {
                let job: JobId = reader.array()?;
                let proof: [u8; PROOF_BYTES] = reader.array()?;
                reader.end()?;
                if !self.identity.key.verify(ACCEPTOR, &[transcript, &self.details, &job], &proof) {
                    return Err(HandshakeError::Rejected(Refusal::WrongSecret));
                }
                if self.job.is_some_and(|expected| expected != job) {
                    return Err(HandshakeError::Rejected(Refusal::NotExpected));
                }
                Ok(DialerStep::Welcome(job))
            }
            _ => Err(Malformed("a response that is no handshake").into()),
        }
    }

    fn challenge(
        &mut self,
        frame: &[u8],
        mut reader: FrameReader,
    ) -> Result<DialerStep, HandshakeError> {
        let magic: [u8; 8] = reader.array()?;
        let (version, rank) = (reader.u16()?, reader.u32()?);
        let _nonce: Nonce = reader.array()?;
        reader.end()?;
        if magic != self.identity.magic {
            return Err(Malformed("the listener is not Weft").into());
        }
        let (oldest, newest) = self.identity.versions;
        if !(oldest..=newest).contains(&version) {
            return Err(HandshakeError::Rejected(Refusal::Version(version)));
        }
        if rank != self.target.0 {
            return Err(HandshakeError::WrongRank(Rank(rank)));
        }
        let transcript = transcript(&self.hello, frame);
        let proof = self.identity.key.prove(DIALER, &[&transcript, &self.details]);
        self.transcript = Some(transcript);
        let frame = FrameWriter::new(PROOF).bytes(&proof).bytes(&self.details).finish();
        Ok(DialerStep::Send(frame))
    }
}

/// Listening side.
pub(crate) struct Acceptor {
    identity: Identity,
    job: JobId,
    /// True if dialers must present the job id.
    require_job: bool,
    state: AcceptorState,
}

enum AcceptorState {
    Hello,
    Proof { dialer: Rank, world_size: u32, transcript: Vec<u8> },
    Authenticated { transcript: Vec<u8>, details: Vec<u8> },
}

/// The acceptor's next action.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AcceptorStep {
    Send(Vec<u8>),
    /// The dialer is authenticated. [`Acceptor::welcome`] admits it.
    Authenticated {
        rank: Rank,
        details: Vec<u8>,
    },
}

impl Acceptor {
    pub(crate) fn new(identity: Identity, job: JobId, require_job: bool) -> Acceptor {
        Acceptor { identity, job, require_job, state: AcceptorState::Hello }
    }

    pub(crate) fn receive(&mut self, frame: &[u8]) -> Result<AcceptorStep, HandshakeError> {
        let mut reader = FrameReader::new(frame);
        match (reader.u8()?, &mut self.state) {
            (HELLO, AcceptorState::Hello) => self.hello(frame, reader),
            (PROOF, AcceptorState::Proof { dialer, world_size, transcript }) => {
                let proof: [u8; PROOF_BYTES] = reader.array()?;
                let details = reader.rest();
                if !self.identity.key.verify(DIALER, &[transcript, details], &proof) {
                    return Err(HandshakeError::Reject(Refusal::WrongSecret));
                }
                if *world_size != self.identity.world_size {
                    return Err(HandshakeError::Reject(Refusal::WorldSize(
                        self.identity.world_size,
                    )));
                }
                let (rank, details) = (*dialer, details.to_vec());
                let transcript = std::mem::take(transcript);
                self.state = AcceptorState::Authenticated { transcript, details: details.clone() };
                Ok(AcceptorStep::Authenticated { rank, details })
            }
            _ => Err(Malformed("this is no handshake").into()),
        }
    }

    fn hello(
        &mut self,
        frame: &[u8],
        mut reader: FrameReader,
    ) -> Result<AcceptorStep, HandshakeError> {
        let magic: [u8; 8] = reader.array()?;
        if magic != self.identity.magic {
            return Err(Malformed("the dialer is not Weft").into());
        }
        let (oldest, newest) = (reader.u16()?, reader.u16()?);
        let version = newest.min(self.identity.versions.1);
        if version < oldest.max(self.identity.versions.0) {
            return Err(HandshakeError::Reject(Refusal::Version(self.identity.versions.1)));
        }
        let (dialer, target, world_size) = (Rank(reader.u32()?), reader.u32()?, reader.u32()?);
        let job: JobId = reader.array()?;
        let _nonce: Nonce = reader.array()?;
        reader.end()?;
        if target != self.identity.rank.0 || (self.require_job && job != self.job) {
            return Err(HandshakeError::Reject(Refusal::NotExpected));
        }
        let nonce: Nonce = random_bytes().map_err(|_| HandshakeError::NoRandomness)?;
        let challenge = FrameWriter::new(CHALLENGE)
            .bytes(&self.identity.magic)
            .u16(version)
            .u32(self.identity.rank.0)
            .bytes(&nonce)
            .finish();
        let body = challenge.get(LENGTH_BYTES..).unwrap_or_default();
        let transcript = transcript(frame, body);
        self.state = AcceptorState::Proof { dialer, world_size, transcript };
        Ok(AcceptorStep::Send(challenge))
    }

    /// Frame that admits the dialer. `None` before the proof.
    pub(crate) fn welcome(&self) -> Option<Vec<u8>> {
        let AcceptorState::Authenticated { transcript, details } = &self.state else { return None };
        let proof = self.identity.key.prove(ACCEPTOR, &[transcript, details, &self.job]);
        Some(FrameWriter::new(WELCOME).bytes(&self.job).bytes(&proof).finish())
    }
}

/// Transcript: the frames before the codes.
fn transcript(hello: &[u8], challenge: &[u8]) -> Vec<u8> {
    [&(hello.len() as u32).to_le_bytes(), hello, challenge].concat()
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
