//! Collective call: payload, the ranks' parts, and progress here.

use crate::{Operation, Rank};
use sha2::{Digest, Sha256};

/// This rank's contribution to a collective call.
#[derive(Clone, Copy)]
pub(crate) enum Payload<'a> {
    /// Same bytes for every rank.
    Same(&'a [u8]),
    /// One element for each rank, by rank.
    Each(&'a [Vec<u8>]),
}

impl Payload<'_> {
    pub(super) fn of(&self, rank: Rank) -> &[u8] {
        match self {
            Payload::Same(bytes) => bytes,
            Payload::Each(bytes) => bytes.get(rank.index()).map_or(&[], Vec::as_slice),
        }
    }

    /// SHA-256 over all elements and the lengths; detects a repeat with another payload.
    pub(super) fn digest(&self) -> [u8; 32] {
        let parts: Vec<&[u8]> = match self {
            Payload::Same(bytes) => vec![bytes],
            Payload::Each(bytes) => bytes.iter().map(Vec::as_slice).collect(),
        };
        let mut digest = Sha256::new();
        for part in parts {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        digest.finalize().into()
    }

    /// Longest element in bytes.
    pub(crate) fn longest(&self) -> usize {
        match self {
            Payload::Same(bytes) => bytes.len(),
            Payload::Each(bytes) => bytes.iter().map(Vec::len).max().unwrap_or(0),
        }
    }
}

/// One rank's part in a call.
pub(super) struct CallPart {
    pub operation: Operation,
    pub payload: Vec<u8>,
}

impl CallPart {
    /// Bytes counted against limits: payload plus 64 bytes overhead.
    pub(super) fn stored_bytes(&self) -> usize {
        self.payload.len() + 64
    }
}

/// Call that this rank has begun.
pub(super) struct PendingCall {
    pub(super) operation: Operation,
    pub(super) digest: [u8; 32],
    /// True while the program waits; false after a wait that ended early.
    pub(super) waiting: bool,
}
