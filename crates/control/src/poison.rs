//! Why a group can no longer be used.

use crate::Rank;
use std::fmt;

/// The first thing that went wrong in a group. Once it is known, every operation of the group
/// fails with it, at every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Poison {
    /// What kind of thing it was.
    pub kind: Cause,
    /// The rank at fault, where one is.
    pub rank: Option<Rank>,
    /// What was seen, for people.
    pub detail: String,
}

/// The kinds of [`Poison`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The process is gone, or its connection was closed without a goodbye.
    Lost,
    /// No sign of life for the silence timeout.
    Silent,
    /// The rank finished before the others were done with it.
    Left,
    /// A write failed: its outcome is unknown.
    Failed,
    /// A peer said something that the protocol does not allow.
    Protocol,
    /// The program asked for it.
    User,
}

impl Cause {
    const ALL: [Cause; 6] =
        [Cause::Lost, Cause::Silent, Cause::Left, Cause::Failed, Cause::Protocol, Cause::User];

    /// The number that stands for it on the wire.
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
            Cause::Silent => "fell silent",
            Cause::Left => "left before the others were done",
            Cause::Failed => "is where a write failed",
            Cause::Protocol => "broke the protocol",
            Cause::User => "poisoned the group",
        };
        match self.rank {
            Some(rank) => write!(f, "{rank} {what}")?,
            None if self.kind == Cause::User => write!(f, "the program poisoned the group")?,
            None => write!(f, "a rank that is not known {what}")?,
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
