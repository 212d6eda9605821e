//! Phase of an operator, and a family's report on a record, as errors print them.

use weft_control::Rank;

/// A family's report on a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Error class for language bindings, as "CapacityError".
    pub class: &'static str,
    /// Rank concerned, if any.
    pub rank: Option<Rank>,
    /// Text of the error.
    pub text: String,
}

/// A phase of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// Its number.
    pub number: u32,
    /// Its name, if a registered family has it.
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
