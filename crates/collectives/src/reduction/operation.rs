//! Operations of reductions.

use super::Element;
use std::fmt;

/// Operation that combines two elements; associative up to rounding, and commutative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Sum; OR of `bool`.
    Sum,
    /// Product; AND of `bool`.
    Product,
    /// Minimum, or NaN if either is; AND of `bool`.
    Min,
    /// Maximum, or NaN if either is; OR of `bool`.
    Max,
    /// Bitwise AND of integers; AND of `bool`.
    And,
    /// Bitwise OR of integers; OR of `bool`.
    Or,
    /// Bitwise exclusive OR of integers; exclusive OR of `bool`.
    Xor,
}

impl Reduction {
    /// All operations.
    pub const ALL: [Reduction; 7] = [
        Reduction::Sum,
        Reduction::Product,
        Reduction::Min,
        Reduction::Max,
        Reduction::And,
        Reduction::Or,
        Reduction::Xor,
    ];

    /// True if elements of this type can be combined: bitwise operations exclude floats.
    pub const fn supports(self, element: Element) -> bool {
        match self {
            Reduction::Sum | Reduction::Product | Reduction::Min | Reduction::Max => true,
            Reduction::And | Reduction::Or | Reduction::Xor => !element.is_float(),
        }
    }

    /// Name in lower case: `sum`, `product`, `min`, `max`, `and`, `or`, `xor`.
    pub const fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Product => "product",
            Reduction::Min => "min",
            Reduction::Max => "max",
            Reduction::And => "and",
            Reduction::Or => "or",
            Reduction::Xor => "xor",
        }
    }

    /// The operation of that name.
    pub fn from_name(name: &str) -> Option<Reduction> {
        Reduction::ALL.into_iter().find(|reduction| reduction.name() == name)
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
