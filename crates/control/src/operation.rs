//! Collective call kinds, with wire codes.

use std::fmt;

/// Collective call kind. Each part carries it, so ranks whose calls differ (for example, a barrier and an all-gather) get
/// [`crate::Error::CallMismatch`] instead of each other's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Last step in [`crate::Control::connect`]: clock offsets.
    Connect,
    /// Last step in [`crate::Control::reform`]: all members have formed the new group.
    Reform,
    /// [`crate::Control::all_gather`].
    AllGather,
    /// [`crate::Control::barrier`].
    Barrier,
    /// [`crate::Control::exchange`].
    Exchange,
    /// Link addresses.
    Addresses,
    /// Introductions between links.
    Introductions,
    /// Region and lane grants.
    Share,
    /// Counter totals.
    Settle,
    /// GPU heap construction.
    Heap,
    /// Collective resource release.
    Close,
}

impl Operation {
    const ALL: [Operation; 11] = [
        Operation::Connect,
        Operation::Reform,
        Operation::AllGather,
        Operation::Barrier,
        Operation::Exchange,
        Operation::Addresses,
        Operation::Introductions,
        Operation::Share,
        Operation::Settle,
        Operation::Heap,
        Operation::Close,
    ];

    /// Wire code.
    pub(crate) fn code(self) -> u8 {
        match self {
            Operation::Connect => 1,
            Operation::Reform => 2,
            Operation::AllGather => 3,
            Operation::Barrier => 4,
            Operation::Exchange => 5,
            Operation::Addresses => 6,
            Operation::Share => 7,
            Operation::Settle => 8,
            Operation::Heap => 9,
            Operation::Close => 10,
            Operation::Introductions => 11,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Operation> {
        Operation::ALL.into_iter().find(|operation| operation.code() == code)
    }

    /// Name in errors.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Connect => "connect",
            Operation::Reform => "reform",
            Operation::AllGather => "all_gather",
            Operation::Barrier => "barrier",
            Operation::Exchange => "exchange",
            Operation::Addresses => "connect (addresses of links)",
            Operation::Introductions => "connect (introductions of links)",
            Operation::Share => "share",
            Operation::Settle => "settle",
            Operation::Heap => "heap",
            Operation::Close => "close",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_survives_its_code_and_has_a_name_of_its_own() {
        for operation in Operation::ALL {
            assert_eq!(Operation::from_code(operation.code()), Some(operation));
            let same = Operation::ALL.iter().filter(|other| other.name() == operation.name());
            assert_eq!(same.count(), 1, "{operation}");
        }
        assert_eq!(Operation::from_code(0), None);
        assert_eq!(Operation::from_code(12), None);
    }
}
