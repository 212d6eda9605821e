//! Errors of running collectives and messages, one variant per cause.

use std::time::Duration;
use weft_fabric::{Cause, MemoryReadError, MissingPeer, Poison, Rank};

/// Failure of an executor or of tagged messages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// Call on a closed executor, or on closed messages.
    #[error("closed: create another one over a communicator that is open")]
    Closed,
    /// Size beyond a limit.
    #[error("{what}: {wanted} wanted, the limit is {limit}")]
    TooLarge {
        /// Meaning of the size.
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
        /// Its value, and the expected one.
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
        /// Text of its error.
        detail: String,
    },
    /// A message longer than its receive. The message was dropped, and the receive has ended.
    #[error("the message with tag {tag} from {peer} has {sent} bytes: the receive has {room}")]
    MessageTooLong {
        /// Sender.
        peer: Rank,
        /// Tag.
        tag: u64,
        /// Bytes of the message.
        sent: u64,
        /// Bytes of the receive.
        room: u64,
    },
    /// A read of a peer's memory that failed. The group is then poisoned.
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
        /// Expected value, or its bound.
        expected: u64,
        /// Value found.
        seen: u64,
    },
    /// A deadline passed. The operation continues, and the wait may be repeated.
    #[error("{what} did not finish within {waited:?}: {}", blocked_text(.missing))]
    Timeout {
        /// Operation.
        what: String,
        /// Time waited.
        waited: Duration,
        /// Peers that block the operation.
        missing: Vec<MissingPeer>,
    },
    /// Error of the fabric.
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

/// Text of the peers that block an operation.
fn blocked_text(missing: &[MissingPeer]) -> String {
    if missing.is_empty() {
        return "no peer is known to block it".to_owned();
    }
    weft_fabric::missing_text(missing)
}
