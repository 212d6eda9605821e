//! Reduction operations.

use super::Element;
use std::fmt;

/// Operation that combines two elements; associative up to rounding, and commutative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Sum; OR for `bool`.
    Sum,
    /// Product; AND for `bool`.
    Product,
    /// Minimum, or NaN if either is; AND for `bool`.
    Min,
    /// Maximum, or NaN if either is; OR for `bool`.
    Max,
    /// Bitwise AND on integers; AND for `bool`.
    And,
    /// Bitwise OR on integers; OR for `bool`.
    Or,
    /// Bitwise exclusive OR on integers; exclusive OR for `bool`.
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

    /// True if elements with this type can be combined: bitwise operations exclude floats.
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

    /// The operation with this name, for example `sum`.
    pub fn from_name(name: &str) -> Option<Reduction> {
        Reduction::ALL.into_iter().find(|reduction| reduction.name() == name)
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
