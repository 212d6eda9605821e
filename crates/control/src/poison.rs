//! Poison: a group's first fatal error.

use crate::Rank;
use std::fmt;

/// A group's first fatal error. Every later group operation fails with it, at every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Poison {
    /// Error kind.
    pub kind: Cause,
    /// Rank at fault, if any.
    pub rank: Option<Rank>,
    /// Detail for messages.
    pub detail: String,
}

/// [`Poison`] kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Process ended, or connection closed without a leave message.
    Lost,
    /// No heartbeat for the silence timeout.
    Silent,
    /// Rank left while others still needed it.
    Left,
    /// Write failed with an unknown outcome.
    Failed,
    /// Protocol violation by a peer.
    Protocol,
    /// Poisoned by the program.
    User,
}

impl Cause {
    const ALL: [Cause; 6] =
        [Cause::Lost, Cause::Silent, Cause::Left, Cause::Failed, Cause::Protocol, Cause::User];

    /// Wire code.
    pub(crate) fn code(self) -> u8 {
        match self {
            Cause::Lost => 1,
            Cause::Silent => 2,
            Cause::Left => 3,
            Cause::Failed => 4,
            Cause::Protocol => 5,
            Cause::User => 6,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Cause> {
        Cause::ALL.into_iter().find(|cause| cause.code() == code)
    }
}

impl fmt::Display for Poison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            Cause::Lost => "was lost",
            Cause::Silent => "is silent",
            Cause::Left => "left before the others were done",
            Cause::Failed => "had a failed write",
            Cause::Protocol => "violated the protocol",
            Cause::User => "poisoned the group",
        };
        match self.rank {
            Some(rank) => write!(f, "{rank} {what}")?,
            None if self.kind == Cause::User => write!(f, "the program poisoned the group")?,
            None => write!(f, "an unknown rank {what}")?,
        }
        if self.detail.is_empty() { Ok(()) } else { write!(f, ": {}", self.detail) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_survives_its_code() {
        for cause in Cause::ALL {
            assert_eq!(Cause::from_code(cause.code()), Some(cause));
        }
        assert_eq!(Cause::from_code(0), None);
    }

    #[test]
    fn it_names_the_rank_and_the_reason() {
        let poison =
            Poison { kind: Cause::Lost, rank: Some(Rank(3)), detail: "connection closed".into() };
        assert_eq!(poison.to_string(), "rank 3 was lost: connection closed");
    }
}
