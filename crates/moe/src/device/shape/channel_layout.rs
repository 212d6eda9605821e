//! Channel areas in a rank's heap, at equal offsets on every rank.

use std::fmt;

use crate::device::options::DeviceConfig;
use crate::device::options::types::{DeviceLayout, TransferPath};
use crate::device::shape::checks::PIECE;
use crate::error::Error;
use crate::shape::placement::Placement;
use crate::shape::sizes::Extent;

/// Areas begin at multiples of this many bytes.
pub(crate) const AREA_ALIGNMENT: u64 = 256;
/// Row alignment, in bytes.
const ROW_ALIGNMENT: u64 = 128;
/// Bytes per expert record in a row's metadata, and per entry.
pub(crate) const RECORD: u64 = 8;
/// Tokens per chunk in the bandwidth path's plan.
pub const CHUNK: u32 = 64;

/// A channel area. Peers write the areas up to [`DeviceArea::Replies`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceArea {
    /// `[ranks][local experts + 1]` packets: a source's tokens for each expert on this rank, then its rows.
    Counts,
    /// `[ranks]` combine packets: 0: replies follow; 1: released there; greater: the room needed there.
    Signals,
    /// `[ranks][max_tokens]` epochs: set when the row from that source and slot has arrived.
    RowFlags,
    /// `[ranks][max_tokens]` rows.
    Rows,
    /// `[ranks][max_tokens]` epochs: set when that rank's reply for its row in that slot has arrived.
    ReplyFlags,
    /// `[ranks][max_tokens]` replies.
    Replies,
    /// State that a rank's calls share; [`StateWord`] names the twin's words.
    State,
    /// `[max_tokens][top_k]` i32: validated expert ids, -1 for masked ones (bandwidth path).
    Ids,
    /// `[max_tokens][top_k]` i32: how many earlier tokens name the expert; in the twin, within the same
    /// chunk (bandwidth path).
    Index,
    /// `[chunks][experts + ranks]` u32: a chunk's tokens for each expert and each rank; in the twin, for the
    /// chunks before it (bandwidth path).
    Histogram,
    /// `[max_tokens][ranks]` i32: a token's slot at a rank, or -1. This area and the following ones are the
    /// plan, which may lie elsewhere ([`PlanLocation`](crate::device::PlanLocation)).
    Slots,
    /// u32 words: rows from each source, then the [`PlanWord`]s.
    Received,
    /// `[ranks][max_tokens][top_k]` pairs (i32 position, -1 for none; f32 weight): this rank's experts in a
    /// received row, in top-k order, from the front. Empty in the dense layout.
    Entries,
}

impl DeviceArea {
    /// All areas, in memory order.
    pub const ALL: [DeviceArea; 13] = [
        DeviceArea::Counts,
        DeviceArea::Signals,
        DeviceArea::RowFlags,
        DeviceArea::Rows,
        DeviceArea::ReplyFlags,
        DeviceArea::Replies,
        DeviceArea::State,
        DeviceArea::Ids,
        DeviceArea::Index,
        DeviceArea::Histogram,
        DeviceArea::Slots,
        DeviceArea::Received,
        DeviceArea::Entries,
    ];

    /// Name in the kernels' macros, `WEFT_<name>_AT`.
    pub fn name(self) -> &'static str {
        match self {
            DeviceArea::Counts => "COUNTS",
            DeviceArea::Signals => "SIGNALS",
            DeviceArea::RowFlags => "ROW_FLAGS",
            DeviceArea::Rows => "ROWS",
            DeviceArea::ReplyFlags => "REPLY_FLAGS",
            DeviceArea::Replies => "REPLIES",
            DeviceArea::State => "STATE",
            DeviceArea::Slots => "SLOTS",
            DeviceArea::Ids => "IDS",
            DeviceArea::Index => "INDEX",
            DeviceArea::Histogram => "HISTOGRAM",
            DeviceArea::Received => "RECEIVED",
            DeviceArea::Entries => "ENTRIES",
        }
    }
}

/// Word in the twin's [`DeviceArea::State`], by u32 index. Kernels use `State` in `moe/shape.cuh` instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateWord {
    /// Rounds that each of the four phases has ended; first of four words.
    Epoch = 0,
    /// Calls that have begun, by phase.
    Entered = 4,
    /// Calls that have ended, by phase.
    Left = 8,
    /// Nonzero after a close.
    Closed = 12,
}

/// Word in [`DeviceArea::Received`], by index after the sources' words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanWord {
    /// Room that the round needed, if it exceeded the available room.
    Needed = 0,
    /// Tokens sent by this rank.
    Sent = 1,
    /// Plan key, from the channel and the round in which it was made; equal on every rank.
    Key = 2,
    /// Positions used by received rows, padding included.
    Used = 3,
}

impl PlanWord {
    pub(crate) const ALL: u64 = 4;
}

/// Channel layout, rows and row parts. Area offsets count from the channel start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChannelLayout {
    extents: [Extent; DeviceArea::ALL.len()],
    channel_bytes: u64,
    /// Scale offset in a row.
    pub row_scales_at: u64,
    /// Metadata offset in a row: for each top-k slot the expert's global id (u16, 0xFFFF for none), how many
    /// earlier tokens from the source name it (u16), and the weight (f32).
    pub row_meta_at: u64,
    /// Row size in bytes, a multiple of 16.
    pub row_bytes: u64,
    /// Row stride in bytes; doubled on the packets path.
    pub row_stride: u64,
    /// Reply size in bytes, a multiple of 16.
    pub reply_bytes: u64,
    /// Reply stride in bytes; doubled on the packets path.
    pub reply_stride: u64,
}

impl ChannelLayout {
    pub(crate) fn new(
        config: &DeviceConfig,
        placement: &Placement,
        path: TransferPath,
    ) -> Result<ChannelLayout, Error> {
        let wide = u64::from;
        let (ranks, tokens, top_k) =
            (wide(config.ranks), wide(config.max_tokens), wide(config.top_k));
        let hidden = wide(config.hidden);
        let local = wide(placement.most_local());

        let row_scales_at = (hidden * config.wire.bytes() as u64).next_multiple_of(PIECE);
        let scales = config.wire.scale_bytes(config.hidden as usize) as u64;
        let row_meta_at = row_scales_at + scales.next_multiple_of(PIECE);
        let row_bytes = (row_meta_at + top_k * RECORD).next_multiple_of(PIECE);
        let reply_bytes = hidden * config.reply_dtype.bytes() as u64;
        let double = if path == TransferPath::Packets { 2 } else { 1 };
        let row_stride = double * row_bytes.next_multiple_of(ROW_ALIGNMENT);
        let reply_stride = double * reply_bytes.next_multiple_of(ROW_ALIGNMENT);

        let planned = if path == TransferPath::Bandwidth { tokens } else { 0 };
        let chunks = planned.div_ceil(wide(CHUNK));
        let mut extents = [Extent::default(); DeviceArea::ALL.len()];
        let mut offset = 0u128;
        for (extent, area) in extents.iter_mut().zip(DeviceArea::ALL) {
            let (rows, stride) = match area {
                DeviceArea::Counts => (ranks, 8 * (local + 1)),
                DeviceArea::Signals => (ranks, 8),
                DeviceArea::RowFlags | DeviceArea::ReplyFlags => (ranks * tokens, 4),
                DeviceArea::Rows => (ranks * tokens, row_stride),
                DeviceArea::Replies => (ranks * tokens, reply_stride),
                DeviceArea::State => (1, AREA_ALIGNMENT),
                DeviceArea::Slots => (tokens, 4 * ranks),
                DeviceArea::Ids | DeviceArea::Index => (planned, 4 * top_k),
                DeviceArea::Histogram => (chunks, 4 * (wide(placement.experts()) + ranks)),
                DeviceArea::Received => (ranks + PlanWord::ALL, 4),
                DeviceArea::Entries if config.layout == DeviceLayout::Dense => (0, RECORD * top_k),
                DeviceArea::Entries => (ranks * tokens, RECORD * top_k),
            };
            let end = offset
                + (u128::from(rows) * u128::from(stride)).next_multiple_of(AREA_ALIGNMENT.into());
            if stride > u64::from(u32::MAX) {
                return Err(Error::DeviceLimit {
                    field: "the stride of rows in bytes",
                    given: stride,
                    limit: u32::MAX.into(),
                    reason: "it is a 32-bit number; lower hidden",
                });
            }
            if end > i64::MAX as u128 {
                return Err(Error::HeapTooLarge { needed: end, limit: i64::MAX as u64 });
            }
            *extent = Extent { offset: offset as u64, rows: rows as u32, stride: stride as u32 };
            offset = end;
        }
        Ok(ChannelLayout {
            extents,
            channel_bytes: offset as u64,
            row_scales_at,
            row_meta_at,
            row_bytes,
            row_stride,
            reply_bytes,
            reply_stride,
        })
    }

    /// An area's offset and rows.
    pub fn extent(&self, area: DeviceArea) -> Extent {
        self.extents[area as usize]
    }

    /// Plan size in bytes: the areas from [`DeviceArea::Slots`] on.
    pub fn plan_bytes(&self) -> u64 {
        self.channel_bytes - self.extent(DeviceArea::Slots).offset
    }

    /// Channel size in bytes.
    pub fn channel_bytes(&self) -> u64 {
        self.channel_bytes
    }

    pub(crate) fn write_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<14} {:>12} {:>10} {:>16}", "area", "rows", "stride", "bytes")?;
        for (extent, area) in self.extents.iter().zip(DeviceArea::ALL) {
            let (name, bytes) = (area.name().to_lowercase().replace('_', " "), extent.bytes());
            writeln!(f, "{name:<14} {:>12} {:>10} {bytes:>16}", extent.rows, extent.stride)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::shape::DeviceShape;
    use crate::elements::dtype::DType;
    use crate::elements::float8::Float8;
    use crate::elements::token_type::{BlockScaled, ScaleType, TokenType};
    use proptest::prelude::*;

    fn config() -> DeviceConfig {
        DeviceConfig::new(3, 0, 7, 2).sized(5, 48)
    }

    proptest! {
        #[test]
        fn areas_follow_each_other_and_are_the_same_on_every_rank(
            (ranks, experts, top_k) in (1u32..10, 1u32..40, 1u32..9),
            (max_tokens, sixteens) in (1u32..2000, 1u32..500),
            path in prop::option::of(Just(TransferPath::Bandwidth)),
        ) {
            let config = DeviceConfig { path, ..DeviceConfig::new(ranks, 0, experts, top_k) };
            let config = config.sized(max_tokens, 16 * sixteens);
            let shape = DeviceShape::new(config.clone()).unwrap();
            let mut end = 0;
            for area in DeviceArea::ALL {
                let extent = shape.channel_layout().extent(area);
                prop_assert_eq!(extent.offset, end, "{:?}", area);
                end = (extent.offset + extent.bytes()).next_multiple_of(AREA_ALIGNMENT);
            }
            prop_assert_eq!(end, shape.channel_layout().channel_bytes());
            prop_assert_eq!(shape.heap_bytes(), 2 * end);
            prop_assert_eq!(shape.at(1, DeviceArea::Counts), end);
            let last = DeviceShape::new(DeviceConfig { rank: ranks - 1, ..config }).unwrap();
            prop_assert_eq!(last.channel_layout(), shape.channel_layout());
            prop_assert_eq!(last.defines(), shape.defines());
        }
    }

    #[test]
    fn rows_have_scales_and_metadata_behind_their_elements() {
        let scaled = BlockScaled { format: Float8::E4M3, scale: ScaleType::F32, block: 32 };
        let cast = DeviceConfig { wire: TokenType::Scaled(scaled), ..config() };
        let shape = DeviceShape::new(cast).unwrap();
        let areas = shape.channel_layout();
        // 48 codes; two scales, in 16 bytes; two records.
        assert_eq!((areas.row_scales_at, areas.row_meta_at, areas.row_bytes), (48, 64, 80));
        assert_eq!((areas.reply_bytes, shape.token_bytes(), shape.scales()), (96, 96, 2));
        // Packets are twice as large.
        assert_eq!(
            (shape.path(), areas.row_stride, areas.reply_stride),
            (TransferPath::Packets, 256, 256)
        );
        let plain = DeviceConfig { path: Some(TransferPath::Latency), ..config() };
        let shape = DeviceShape::new(plain).unwrap();
        let areas = shape.channel_layout();
        assert_eq!((areas.row_scales_at, areas.row_meta_at, areas.row_bytes), (96, 96, 112));
        assert_eq!((areas.row_stride, areas.reply_stride), (128, 128));
        assert_eq!(areas.extent(DeviceArea::Counts).bytes(), 3 * 8 * 4);
        assert_eq!(areas.extent(DeviceArea::Entries).bytes(), 3 * 5 * 2 * 8);
        assert_eq!(areas.extent(DeviceArea::Histogram).bytes(), 0);
    }

    #[test]
    fn the_plan_of_the_bandwidth_path_has_areas() {
        let config = DeviceConfig { path: Some(TransferPath::Bandwidth), ..config().sized(65, 48) };
        let shape = DeviceShape::new(config).unwrap();
        assert_eq!(shape.channel_layout().extent(DeviceArea::Ids).bytes(), 65 * 2 * 4);
        assert_eq!(shape.channel_layout().extent(DeviceArea::Histogram).bytes(), 2 * (7 + 3) * 4);
    }

    #[test]
    fn the_table_names_every_area_and_the_heap() {
        let shape = DeviceShape::new(config().tokens(DType::F32.into())).unwrap();
        let table = shape.to_string();
        for area in DeviceArea::ALL {
            assert!(table.contains(&area.name().to_lowercase().replace('_', " ")), "{table}");
        }
        assert!(table.ends_with(&shape.heap_bytes().to_string()), "{table}");
    }
}
