//! Record: what a kernel tells the host, and the error that the host makes of it.

use super::family::Families;
use crate::error::Error;
use weft_control::Rank;

/// No rank: what stands in a record for a peer if there is none.
const NOBODY: u32 = u32::MAX;

/// What a kernel recorded. Phases, and codes that not all families share, are numbers of a
/// [`Family`](super::Family).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What happened.
    pub code: Code,
    /// Who recorded it.
    pub rank: u32,
    /// Where it stood.
    pub phase: u32,
    /// The other rank, if one is concerned: whom it waited for, or who lacks room.
    pub peer: Option<u32>,
    /// The channel: which set of buffers.
    pub channel: u32,
    /// The row, or the token, that it is about.
    pub slot: u32,
    /// What should have been there: an epoch, or what the family says.
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
    /// A code of a family's own.
    Own(u32),
}

impl Code {
    /// The number in memory.
    pub fn number(self) -> u32 {
        match self {
            Code::Timeout => 1,
            Code::Aborted => 2,
            Code::Overlap => 3,
            Code::OutOfOrder => 4,
            Code::Own(number) => number,
        }
    }

    fn from_number(number: u32) -> Code {
        match number {
            1 => Code::Timeout,
            2 => Code::Aborted,
            3 => Code::Overlap,
            4 => Code::OutOfOrder,
            number => Code::Own(number),
        }
    }
}

impl Record {
    /// The first six words in memory.
    pub(super) fn words(&self) -> [u32; 6] {
        let peer = self.peer.unwrap_or(NOBODY);
        [self.code.number(), self.rank, self.phase, peer, self.channel, self.slot]
    }

    /// From what a device wrote, which may be anything.
    pub(super) fn from_words(words: [u32; 6], expected: u64, seen: u64) -> Record {
        let [code, rank, phase, peer, channel, slot] = words;
        let (code, peer) = (Code::from_number(code), (peer != NOBODY).then_some(peer));
        Record { code, rank, phase, peer, channel, slot, expected, seen }
    }

    /// The record as an error, worded for whoever runs the program. What no family of `families` has
    /// gets a number in place of a name.
    pub fn error(&self, families: &Families) -> Error {
        let Record { rank, peer, channel, slot, expected, seen, .. } = *self;
        let (rank, peer, phase) = (Rank(rank), peer.map(Rank), families.phase(self.phase));
        match self.code {
            Code::Timeout => Error::Timeout { rank, phase, peer, channel, slot, expected, seen },
            Code::Aborted => Error::Aborted { rank, phase, channel },
            Code::Overlap => Error::Overlap { rank, phase, channel },
            Code::OutOfOrder => {
                let order = families.order(self.phase);
                Error::OutOfOrder { rank, phase, channel, expected, seen, order }
            }
            Code::Own(code) => match families.explain(self, code) {
                Some(report) => Error::Reported(report),
                None => Error::UnknownRecord { rank, code, phase, peer, expected, seen },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::{Family, Phase, Report};
    use proptest::prelude::*;

    proptest! {
        /// Whatever a device writes is a record, has words for the user and panics nowhere.
        #[test]
        fn any_memory_is_a_record(words: [u32; 6], expected: u64, seen: u64) {
            let record = Record::from_words(words, expected, seen);
            prop_assert_eq!(record.words(), words);
            prop_assert!(!record.error(&Families::default()).to_string().is_empty());
        }
    }

    fn explain(record: &Record, phase: Phase) -> Report {
        let text = format!("{phase} says {}", record.seen);
        Report { class: "CapacityError", rank: record.peer.map(Rank), text }
    }

    static FAMILY: Family = Family {
        name: "test",
        first_phase: 2,
        phases: &["send", "receive"],
        order: "send, then receive",
        first_code: 5,
        codes: 1,
        explain,
    };

    fn said(code: u32, phase: u32, peer: u32, slot: u32, expected: u64, seen: u64) -> String {
        let mut families = Families::default();
        families.add(&FAMILY).unwrap();
        let record = Record::from_words([code, 2, phase, peer, 1, slot], expected, seen);
        record.error(&families).to_string()
    }

    #[test]
    fn a_timeout_names_rank_phase_peer_expected_and_seen() {
        assert_eq!(
            said(1, 3, 5, 17, 8, 7),
            "rank 2 waited for rank 5 in receive (channel 1, slot 17) and gave up: epoch 8 was \
             expected, 7 was seen; rank 5 is lost, stuck or further behind than skew_timeout allows"
        );
        assert!(said(1, 2, NOBODY, 0, 8, 7).starts_with("rank 2 waited in send (channel 1"));
    }

    #[test]
    fn what_a_user_can_mend_says_how() {
        let stage = said(4, 3, NOBODY, 0, 4, 2);
        assert!(stage.contains("receive of round 4"), "{stage}");
        assert!(stage.ends_with("each round is send, then receive"), "{stage}");
        let overlap = said(3, 2, NOBODY, 0, 0, 0);
        assert!(overlap.contains("one stream"), "{overlap}");
    }

    #[test]
    fn what_only_a_family_records_is_worded_by_it() {
        assert_eq!(said(5, 2, 1, 0, 0, 9), "send says 9");
        let unknown = said(6, 9, 1, 0, 0, 9);
        assert!(unknown.contains("code 6 at rank 2 in phase 9 about rank 1"), "{unknown}");
    }
}
