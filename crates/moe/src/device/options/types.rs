//! Option types.

use std::fmt;

/// Layout for received tokens on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceLayout {
    /// A row group for each expert, which begins and ends at a multiple of `pad_to` rows. Padding is not
    /// written.
    Contiguous {
        /// Group sizes are rounded up to a multiple of this many rows, at least 1.
        pad_to: u32,
    },
    /// Tokens stay in the slots in which they arrived; each expert has a list of slots.
    Indexed,
    /// A group with `expert_capacity` rows for each expert, so that groups begin at offsets known before the
    /// round.
    Padded {
        /// Group size in rows; `None` is the worst case, `ranks * max_tokens`.
        expert_capacity: Option<u32>,
    },
    /// Each row once, by source and slot, with the local ids and weights for the row's experts on this rank.
    /// Outputs are rows too, each the weighted sum over the experts, so only
    /// [`Weighting::AtExpert`](crate::Weighting::AtExpert) is supported.
    Dense,
}

/// Layout for received tokens' scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleLayout {
    /// Row-major: a row's scales are consecutive.
    Row,
    /// Column-major: column `b` holds block `b`'s scales for all rows; columns begin at multiples of 16
    /// bytes. In the padded layout each expert has separate columns.
    Column,
    /// Column-major in 32-bit words, each with four blocks' UE8M0 scales, the first in the lowest bits.
    ColumnPacked,
}

impl ScaleLayout {
    /// All layouts.
    pub const ALL: [ScaleLayout; 3] =
        [ScaleLayout::Row, ScaleLayout::Column, ScaleLayout::ColumnPacked];
}

/// Row transfer path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferPath {
    /// Each 32-bit word in a row is sent with the epoch beside it: twice the bytes, no flag.
    Packets,
    /// A row, then a flag; each sender plans its batch itself.
    Latency,
    /// A row, then a flag; separate kernels plan the batch. For large batches.
    Bandwidth,
}

/// Expert id type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IdWidth {
    /// 32 bits, signed.
    I32,
    /// 64 bits, signed.
    I64,
}

impl IdWidth {
    /// Id size in bytes.
    pub fn bytes(self) -> usize {
        match self {
            IdWidth::I32 => 4,
            IdWidth::I64 => 8,
        }
    }
}

impl TransferPath {
    /// All paths.
    pub const ALL: [TransferPath; 3] =
        [TransferPath::Packets, TransferPath::Latency, TransferPath::Bandwidth];

    /// Option value name.
    pub fn name(self) -> &'static str {
        match self {
            TransferPath::Packets => "packets",
            TransferPath::Latency => "latency",
            TransferPath::Bandwidth => "bandwidth",
        }
    }

    /// The path with this name.
    pub fn from_name(name: &str) -> Option<TransferPath> {
        TransferPath::ALL.into_iter().find(|path| path.name() == name)
    }
}

impl fmt::Display for TransferPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
