//! What a record says, and in which words the user is told.

use crate::error::Error;
use weft_control::Rank;

/// No rank: what stands in a record for a peer if there is none.
const NOBODY: u32 = u32::MAX;

/// What a kernel recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What happened.
    pub code: Code,
    /// Who recorded it.
    pub rank: u32,
    /// Where it stood.
    pub phase: Phase,
    /// The other rank, if one is concerned: whom it waited for, or who lacks room.
    pub peer: Option<u32>,
    /// The channel: which set of buffers.
    pub channel: u32,
    /// The row, or the token, that it is about.
    pub slot: u32,
    /// What should have been there: an epoch, a number of positions, or the number of experts.
    pub expected: u64,
    /// What was there.
    pub seen: u64,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// A wait on the device expired.
    Timeout,
    /// The host set the abort word.
    Aborted,
    /// Two launches were under way at once on one channel.
    Overlap,
    /// The phases of a round were launched out of order.
    OutOfOrder,
    /// A token names an expert that does not exist, or names one twice.
    Expert,
    /// A rank has no room for what is on its way to it.
    Capacity,
    /// A peer released a round that this rank combines.
    Released,
    /// What this build does not know.
    Unknown(u32),
}

impl Code {
    /// The number in memory.
    pub fn number(self) -> u32 {
        match self {
            Code::Timeout => 1,
            Code::Aborted => 2,
            Code::Overlap => 3,
            Code::OutOfOrder => 4,
            Code::Expert => 5,
            Code::Capacity => 6,
            Code::Released => 7,
            Code::Unknown(number) => number,
        }
    }

    fn from_number(number: u32) -> Code {
        match number {
            1 => Code::Timeout,
            2 => Code::Aborted,
            3 => Code::Overlap,
            4 => Code::OutOfOrder,
            5 => Code::Expert,
            6 => Code::Capacity,
            7 => Code::Released,
            number => Code::Unknown(number),
        }
    }
}

/// Where a round stood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Tokens leave.
    DispatchSend,
    /// Tokens arrive and are placed.
    DispatchRecv,
    /// Answers leave.
    CombineSend,
    /// Answers arrive and are summed.
    CombineRecv,
    /// The routing is counted, before tokens leave.
    Plan,
    /// What this build does not know.
    Unknown(u32),
}

impl Phase {
    /// The number in memory.
    pub fn number(self) -> u32 {
        match self {
            Phase::DispatchSend => 0,
            Phase::DispatchRecv => 1,
            Phase::CombineSend => 2,
            Phase::CombineRecv => 3,
            Phase::Plan => 4,
            Phase::Unknown(number) => number,
        }
    }

    /// The phase of this number.
    pub fn from_number(number: u32) -> Phase {
        match number {
            0 => Phase::DispatchSend,
            1 => Phase::DispatchRecv,
            2 => Phase::CombineSend,
            3 => Phase::CombineRecv,
            4 => Phase::Plan,
            number => Phase::Unknown(number),
        }
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Phase::DispatchSend => f.write_str("dispatch_send"),
            Phase::DispatchRecv => f.write_str("dispatch_recv"),
            Phase::CombineSend => f.write_str("combine_send"),
            Phase::CombineRecv => f.write_str("combine_recv"),
            Phase::Plan => f.write_str("plan"),
            Phase::Unknown(number) => write!(f, "phase {number}"),
        }
    }
}

impl Record {
    /// The first six words in memory.
    pub(super) fn words(&self) -> [u32; 6] {
        let peer = self.peer.unwrap_or(NOBODY);
        [self.code.number(), self.rank, self.phase.number(), peer, self.channel, self.slot]
    }

    /// From what a device wrote, which may be anything.
    pub(super) fn from_words(words: [u32; 6], expected: u64, seen: u64) -> Record {
        let [code, rank, phase, peer, channel, slot] = words;
        Record {
            code: Code::from_number(code),
            rank,
            phase: Phase::from_number(phase),
            peer: (peer != NOBODY).then_some(peer),
            channel,
            slot,
            expected,
            seen,
        }
    }

    /// The record as an error, worded for whoever runs the program.
    pub fn error(&self) -> Error {
        let Record { rank, phase, peer, channel, slot, expected, seen, .. } = *self;
        let (rank, peer) = (Rank(rank), peer.map(Rank));
        match self.code {
            Code::Timeout => Error::Timeout { rank, phase, peer, channel, slot, expected, seen },
            Code::Aborted => Error::Aborted { rank, phase, channel },
            Code::Overlap => Error::Overlap { rank, phase, channel },
            Code::OutOfOrder => Error::OutOfOrder { rank, phase, channel, expected, seen },
            Code::Expert => {
                Error::Expert { rank, token: slot, expert: seen, experts: expected, channel }
            }
            Code::Capacity => Error::Capacity {
                rank: peer.unwrap_or(rank),
                channel,
                needed: expected,
                room: seen,
            },
            Code::Released => Error::Released { rank, phase, peer, channel },
            Code::Unknown(code) => Error::UnknownRecord { rank, code, phase, peer, expected, seen },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever a device writes is a record, has words for the user and panics nowhere.
        #[test]
        fn any_memory_is_a_record(words: [u32; 6], expected: u64, seen: u64) {
            let record = Record::from_words(words, expected, seen);
            prop_assert_eq!(record.words(), words);
            prop_assert!(!record.error().to_string().is_empty());
        }

        #[test]
        fn known_numbers_are_known(code in 1u32..8, phase in 0u32..5) {
            let record = Record::from_words([code, 0, phase, NOBODY, 0, 0], 0, 0);
            prop_assert!(!matches!(record.code, Code::Unknown(_)));
            prop_assert!(!matches!(record.phase, Phase::Unknown(_)));
            prop_assert_eq!(record.words(), [code, 0, phase, NOBODY, 0, 0]);
        }
    }

    fn said(code: u32, phase: u32, peer: u32, slot: u32, expected: u64, seen: u64) -> String {
        Record::from_words([code, 2, phase, peer, 1, slot], expected, seen).error().to_string()
    }

    #[test]
    fn a_timeout_names_rank_phase_peer_expected_and_seen() {
        assert_eq!(
            said(1, 3, 5, 17, 8, 7),
            "rank 2 waited for rank 5 in combine_recv (channel 1, slot 17) and gave up: epoch 8 was \
             expected, 7 was seen; rank 5 is lost, stuck or further behind than skew_timeout allows"
        );
        assert!(
            said(1, 0, NOBODY, 0, 8, 7).starts_with("rank 2 waited in dispatch_send (channel 1")
        );
    }

    #[test]
    fn what_a_user_can_mend_says_how() {
        assert_eq!(
            said(6, 1, 5, 0, 4096, 1024),
            "rank 5 would receive 4096 positions but has room for 1024, 3072 too few (channel 1): \
             raise max_positions or expert_capacity there, or send smaller batches; nothing was \
             placed and the batch is lost"
        );
        let (outside, twice) = (said(5, 4, NOBODY, 9, 64, 70), said(5, 4, NOBODY, 9, 64, 3));
        assert!(outside.contains("token 9 names expert 70, but there are 64 experts"), "{outside}");
        assert!(twice.contains("token 9 names expert 3 twice"), "{twice}");
        let stage = said(4, 2, NOBODY, 0, 4, 2);
        assert!(stage.contains("combine_send") && stage.contains("round 4"), "{stage}");
        let overlap = said(3, 0, NOBODY, 0, 0, 0);
        assert!(overlap.contains("one stream"), "{overlap}");
    }
}
