//! Errors from running collectives and messages, one variant per cause.

use std::time::Duration;
use weft_fabric::{Cause, MemoryReadError, MissingPeer, Poison, Rank, Rounded, missing_text};

/// Failure in an executor or in tagged messages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// Call on a closed executor, or on closed messages.
    #[error("the collectives of this group were closed: form a new group")]
    Closed,
    /// Size beyond a limit.
    #[error("{what}: {wanted} wanted, the limit is {limit}")]
    TooLarge {
        /// Measured quantity, for example `message bytes`.
        what: &'static str,
        /// Requested size.
        wanted: u64,
        /// Limit.
        limit: u64,
    },
    /// Invalid argument.
    #[error("{what}: {detail}")]
    Invalid {
        /// Argument.
        what: &'static str,
        /// The value, and the expected one.
        detail: String,
    },
    /// Two ranks passed different arguments to a collective call.
    #[error("{what} is {ours} here and {theirs} at {peer}: pass equal ones on all ranks")]
    Disagreement {
        /// Peer.
        peer: Rank,
        /// First argument that differs.
        what: &'static str,
        /// Value here.
        ours: u64,
        /// Value there.
        theirs: u64,
    },
    /// A peer that could not take part in a collective call.
    #[error("{peer} could not create its part: {detail}")]
    PeerFailed {
        /// Peer.
        peer: Rank,
        /// The peer's error text.
        detail: String,
    },
    /// A message longer than its receive. The message was dropped, and the receive has ended.
    #[error(
        "the message with tag {tag} from {peer} has {sent} bytes: the receive has {room}; pass as many at both ranks"
    )]
    MessageTooLong {
        /// Sender.
        peer: Rank,
        /// Tag.
        tag: u64,
        /// Message size in bytes.
        sent: u64,
        /// Receive size in bytes.
        room: u64,
    },
    /// A failed read from a peer's memory. The group is then poisoned.
    #[error("memory of {peer}: {error}")]
    PeerMemory {
        /// Peer.
        peer: Rank,
        /// Failure.
        error: MemoryReadError,
    },
    /// A peer that violated the protocol. The group is then poisoned.
    #[error("protocol violation of {peer}: {what} is {seen}, expected {expected}")]
    Violation {
        /// Peer.
        peer: Rank,
        /// Field.
        what: &'static str,
        /// Expected value, or a bound.
        expected: u64,
        /// Value found.
        seen: u64,
    },
    /// A deadline passed. The operation continues, and the wait may be repeated.
    #[error("{what} did not finish within {}: {}", Rounded(*waited), missing_text(.missing))]
    Timeout {
        /// Operation.
        what: String,
        /// Time waited.
        waited: Duration,
        /// Peers that block the operation.
        missing: Vec<MissingPeer>,
    },
    /// Fabric error.
    #[error(transparent)]
    Fabric(#[from] weft_fabric::Error),
}

impl RunError {
    /// Rank that violated the protocol, or whose memory could not be read, if there is one.
    pub fn offender(&self) -> Option<Rank> {
        match self {
            RunError::Violation { peer, .. } | RunError::PeerMemory { peer, .. } => Some(*peer),
            _ => None,
        }
    }

    /// Cause for which the group is poisoned, if the rank at fault must be excluded.
    pub(crate) fn poison(&self) -> Option<Poison> {
        let (kind, rank) = (Cause::Protocol, Some(self.offender()?));
        Some(Poison { kind, rank, detail: self.to_string() })
    }
}
