//! Types of options.

use std::fmt;

/// Layout of received tokens on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceLayout {
    /// A group of rows for each expert, which begins and ends at a multiple of `pad_to` rows. Padding is not
    /// written.
    Contiguous {
        /// Group sizes are rounded up to a multiple of this number of rows, at least 1.
        pad_to: u32,
    },
    /// Tokens stay in the slots in which they arrived; each expert has a list of slots.
    Indexed,
    /// A group of `expert_capacity` rows for each expert, so that groups begin at offsets known before the
    /// round.
    Padded {
        /// Rows of a group; `None` is the worst case, `ranks * max_tokens`.
        expert_capacity: Option<u32>,
    },
    /// Each row once, by source and slot, with the local ids and weights of its experts on this rank. Outputs
    /// are rows too, each the weighted sum of its experts, so only
    /// [`Weighting::AtExpert`](crate::Weighting::AtExpert) is supported.
    Dense,
}

/// Layout of the scales of received tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleLayout {
    /// Row-major: the scales of a row are consecutive.
    Row,
    /// Column-major: column `b` holds the scales of block `b` of all rows; columns begin at multiples of 16
    /// bytes. In the padded layout each expert has its own columns.
    Column,
    /// Column-major in 32-bit words, each with the UE8M0 scales of four blocks, the first in the lowest bits.
    ColumnPacked,
}

impl ScaleLayout {
    /// All layouts.
    pub const ALL: [ScaleLayout; 3] =
        [ScaleLayout::Row, ScaleLayout::Column, ScaleLayout::ColumnPacked];
}

/// Transfer path of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferPath {
    /// Each 32-bit word of a row is sent with the epoch beside it: twice the bytes, no flag.
    Packets,
    /// A row, then its flag; each sender plans its batch itself.
    Latency,
    /// A row, then its flag; separate kernels plan the batch. For large batches.
    Bandwidth,
}

/// Type of expert ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IdWidth {
    /// 32 bits, signed.
    I32,
    /// 64 bits, signed.
    I64,
}

impl IdWidth {
    /// Bytes of an id.
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

    /// Name of the option value.
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
