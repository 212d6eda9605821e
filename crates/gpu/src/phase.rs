//! Operator phase, and a family's report on a record, as errors print them.

use weft_control::Rank;

/// Phase in records for an expired wait for a proxy's word, in kernels of users.
pub const PROXY_WAIT: u32 = 66;
/// Phase in records for an expired push to a proxy's ring.
pub const PROXY_PUSH: u32 = 67;

/// True for phases in which kernels wait for a proxy.
pub fn is_proxy(phase: u32) -> bool {
    phase == PROXY_WAIT || phase == PROXY_PUSH
}

/// A family's report on a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Error class for language bindings, as "CapacityError".
    pub class: &'static str,
    /// Rank concerned, if any.
    pub rank: Option<Rank>,
    /// Error text.
    pub text: String,
}

/// Operator phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// Phase number.
    pub number: u32,
    /// Phase name, if a registered family has it.
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
