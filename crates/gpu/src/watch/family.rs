//! Operator families: phases and codes, and the errors for their records.

use super::record::{Code, Record};
use crate::error::{Error, Result};
use crate::phase::{Phase, Report};
use weft_control::Rank;

/// A family: operators whose kernels share phases and codes, such as MoE's dispatch and combine.
///
/// Records hold numbers. No two families share one, so each record identifies the phase.
#[derive(Debug)]
pub struct Family {
    /// Family name, for errors.
    pub name: &'static str,
    /// First phase number.
    pub first_phase: u32,
    /// Phase names, in order.
    pub phases: &'static [&'static str],
    /// Phase order in a round, for [`Error::OutOfOrder`].
    pub order: &'static str,
    /// First code number, above [`Family::COMMON_CODES`].
    pub first_code: u32,
    /// Code count.
    pub codes: u32,
    /// Report on a record with a code from this family.
    pub explain: fn(&Record, phase: Phase) -> Report,
}

impl Family {
    /// Number of codes with the same meaning in all families.
    pub const COMMON_CODES: u32 = 5;

    /// True for the family's own phases.
    pub fn has_phase(&self, phase: u32) -> bool {
        self.name_of(phase).is_some()
    }

    fn name_of(&self, phase: u32) -> Option<&'static str> {
        self.phases.get(phase.checked_sub(self.first_phase)? as usize).copied()
    }

    fn has_code(&self, code: u32) -> bool {
        code.checked_sub(self.first_code).is_some_and(|own| own < self.codes)
    }

    fn overlaps(&self, other: &Family) -> bool {
        let overlap = |a: u32, a_len: u32, b: u32, b_len: u32| a < b + b_len && b < a + a_len;
        let phases = |family: &Family| family.phases.len() as u32;
        overlap(self.first_phase, phases(self), other.first_phase, phases(other))
            || overlap(self.first_code, self.codes, other.first_code, other.codes)
    }
}

/// Families in a domain.
#[derive(Clone, Debug, Default)]
pub struct Families(Vec<&'static Family>);

impl Families {
    /// Adds a family, once.
    ///
    /// # Errors
    /// [`Error::Families`] if numbers overlap another family's or the common ones.
    pub fn add(&mut self, family: &'static Family) -> Result<()> {
        if self.0.iter().any(|known| std::ptr::eq(*known, family)) {
            return Ok(());
        }
        let taken = self.0.iter().find(|known| known.overlaps(family)).map(|known| known.name);
        let common = (family.first_code < Family::COMMON_CODES).then_some("every family");
        match taken.or(common) {
            Some(other) => Err(Error::Families { family: family.name, other }),
            None => {
                self.0.push(family);
                Ok(())
            }
        }
    }

    /// Phase with this number, and the name.
    pub fn phase(&self, number: u32) -> Phase {
        Phase { number, name: self.0.iter().find_map(|family| family.name_of(number)) }
    }

    /// Phase order in the family that has this phase.
    pub fn order(&self, phase: u32) -> &'static str {
        self.0.iter().find(|family| family.has_phase(phase)).map_or("", |family| family.order)
    }

    /// Report from the family that has the code.
    pub fn explain(&self, record: &Record, code: u32) -> Option<Report> {
        let family = self.0.iter().find(|family| family.has_code(code))?;
        Some((family.explain)(record, self.phase(record.phase)))
    }

    /// Error for a record. Phases in unregistered families are printed as numbers.
    pub fn error(&self, record: &Record) -> Error {
        let Record { rank, peer, channel, slot, expected, seen, .. } = *record;
        let (rank, peer, phase) = (Rank(rank), peer.map(Rank), self.phase(record.phase));
        match record.code {
            Code::Timeout => Error::Timeout { rank, phase, peer, channel, slot, expected, seen },
            Code::Aborted => Error::Aborted { rank, phase, channel },
            Code::Overlap => Error::Overlap { rank, phase, channel },
            Code::OutOfOrder => {
                let order = self.order(record.phase);
                Error::OutOfOrder { rank, phase, channel, expected, seen, order }
            }
            Code::Family(code) => match self.explain(record, code) {
                Some(report) => Error::Reported(report),
                None => Error::UnknownRecord { rank, code, phase, peer, expected, seen },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::record::NO_PEER;
    use proptest::prelude::*;

    fn silent(_: &Record, _: Phase) -> Report {
        Report { class: "DeviceError", rank: None, text: "explained".into() }
    }

    const fn family(name: &'static str, first_phase: u32, first_code: u32) -> Family {
        let (phases, order, codes, explain) = (&["send", "receive"], "", 2, silent as _);
        Family { name, first_phase, phases, order, first_code, codes, explain }
    }

    #[test]
    fn families_with_overlapping_numbers_are_rejected() {
        static ONE: Family = family("one", 0, 5);
        static NEXT: Family = family("next", 2, 7);
        static PHASES: Family = family("phases", 3, 9);
        static CODES: Family = family("codes", 4, 6);
        static COMMON: Family = family("common", 8, 3);
        let mut families = Families::default();
        for known in [&ONE, &NEXT, &ONE] {
            families.add(known).unwrap();
        }
        for (wrong, other) in [(&PHASES, "next"), (&CODES, "one"), (&COMMON, "every family")] {
            let error = families.add(wrong).unwrap_err().to_string();
            assert!(error.contains(wrong.name) && error.contains(other), "{error}");
        }
        assert_eq!(families.phase(3).to_string(), "receive");
        assert_eq!(families.phase(4).to_string(), "phase 4");
    }

    proptest! {
        /// Arbitrary device words are a record with an error text, without a panic.
        #[test]
        fn any_memory_is_a_record(words: [u32; 6], expected: u64, seen: u64) {
            let record = Record::from_words(words, expected, seen);
            prop_assert_eq!(record.words(), words);
            prop_assert!(!Families::default().error(&record).to_string().is_empty());
        }
    }

    fn explain(record: &Record, phase: Phase) -> Report {
        let text = format!("{phase} observed {}", record.seen);
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

    fn error_of(code: u32, phase: u32, peer: u32, slot: u32, expected: u64, seen: u64) -> String {
        let mut families = Families::default();
        families.add(&FAMILY).unwrap();
        let record = Record::from_words([code, 2, phase, peer, 1, slot], expected, seen);
        families.error(&record).to_string()
    }

    #[test]
    fn a_timeout_names_rank_phase_peer_expected_and_seen() {
        assert_eq!(
            error_of(1, 3, 5, 17, 8, 7),
            "rank 2 waited for rank 5 in receive (channel 1, slot 17) and timed out: expected epoch 8, \
             observed 7; rank 5 is lost, stuck or further behind than skew_timeout allows"
        );
        assert!(error_of(1, 2, NO_PEER, 0, 8, 7).starts_with("rank 2 waited in send (channel 1"));
    }

    #[test]
    fn errors_of_usage_state_the_remedy() {
        let stage = error_of(4, 3, NO_PEER, 0, 4, 2);
        assert!(stage.contains("receive of round 4"), "{stage}");
        assert!(stage.ends_with("each round is send, then receive"), "{stage}");
        let overlap = error_of(3, 2, NO_PEER, 0, 0, 0);
        assert!(overlap.contains("one stream"), "{overlap}");
    }

    #[test]
    fn records_of_a_family_are_reported_by_it() {
        assert_eq!(error_of(5, 2, 1, 0, 0, 9), "send observed 9");
        let unknown = error_of(6, 9, 1, 0, 0, 9);
        assert!(
            unknown.contains("code 6 in a record of rank 2 in phase 9 about rank 1"),
            "{unknown}"
        );
    }
}
