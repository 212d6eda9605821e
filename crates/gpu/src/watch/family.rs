//! Families of operators: the names of their phases, and the words for what only they record.

use super::Record;
use crate::error::{Error, Result};
use weft_control::Rank;

/// A family: the operators whose kernels share phases and codes, such as MoE's dispatch and combine.
///
/// Records hold numbers. Those of all families are distinct, so that a record of any operator of a domain
/// names its phase.
#[derive(Debug)]
pub struct Family {
    /// Its name, for errors.
    pub name: &'static str,
    /// The number of its first phase.
    pub first_phase: u32,
    /// The names of its phases, from the first on.
    pub phases: &'static [&'static str],
    /// The order of the phases of a round, for the error of a launch out of order.
    pub order: &'static str,
    /// The number of its first code, above [`Family::COMMON_CODES`].
    pub first_code: u32,
    /// How many codes it has.
    pub codes: u32,
    /// The words for a record with a code of its own.
    pub explain: fn(&Record, phase: Phase) -> Report,
}

/// What a family makes of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The class of the error, for bindings that raise it as one: "CapacityError".
    pub class: &'static str,
    /// The rank that it is about, if it is about one.
    pub rank: Option<Rank>,
    /// The error's text.
    pub text: String,
}

/// A phase, as errors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// Its number.
    pub number: u32,
    /// Its name, if a family that is known has it.
    pub name: Option<&'static str>,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.name {
            Some(name) => f.write_str(name),
            None => write!(f, "phase {}", self.number),
        }
    }
}

impl Family {
    /// Codes below this one mean the same in every family.
    pub const COMMON_CODES: u32 = 5;

    /// Whether this phase is one of its own.
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
        let meet = |a: u32, a_len: u32, b: u32, b_len: u32| a < b + b_len && b < a + a_len;
        let phases = |family: &Family| family.phases.len() as u32;
        meet(self.first_phase, phases(self), other.first_phase, phases(other))
            || meet(self.first_code, self.codes, other.first_code, other.codes)
    }
}

/// The families of a domain.
#[derive(Clone, Debug, Default)]
pub struct Families(Vec<&'static Family>);

impl Families {
    /// Adds a family; one that is here already changes nothing.
    ///
    /// # Errors
    /// [`Error::Families`] if its numbers are another's, or common to all.
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

    /// A phase with its name.
    pub fn phase(&self, number: u32) -> Phase {
        Phase { number, name: self.0.iter().find_map(|family| family.name_of(number)) }
    }

    /// The order of phases of the family that has this one.
    pub fn order(&self, phase: u32) -> &'static str {
        self.0.iter().find(|family| family.has_phase(phase)).map_or("", |family| family.order)
    }

    /// What the family that has the record's code makes of it.
    pub fn explain(&self, record: &Record, code: u32) -> Option<Report> {
        let family = self.0.iter().find(|family| family.has_code(code))?;
        Some((family.explain)(record, self.phase(record.phase)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn silent(_: &Record, _: Phase) -> Report {
        Report { class: "DeviceError", rank: None, text: "explained".into() }
    }

    const fn family(name: &'static str, first_phase: u32, first_code: u32) -> Family {
        let (phases, order, codes, explain) = (&["send", "receive"], "", 2, silent as _);
        Family { name, first_phase, phases, order, first_code, codes, explain }
    }

    #[test]
    fn families_whose_numbers_meet_are_refused() {
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
}
