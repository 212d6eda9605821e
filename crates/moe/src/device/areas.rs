//! Where everything lies in a rank's heap: the same on every rank.

use std::fmt;

use crate::device::config::{DeviceConfig, PIECE, Path};
use crate::error::Error;
use crate::placement::Placement;
use crate::sizes::Extent;

/// Areas begin at multiples of this many bytes.
pub(crate) const AREA_ALIGNMENT: u64 = 256;
/// Rows begin at multiples of this many bytes.
const ROW_ALIGNMENT: u64 = 128;
/// Bytes of one expert's record in a row's metadata, and of an entry.
pub(crate) const RECORD: u64 = 8;
/// Tokens that the bandwidth path's plan takes at a time.
pub const CHUNK: u32 = 64;

/// An area of a channel. Those up to [`DeviceArea::Answers`] are written by peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceArea {
    /// `[ranks][local experts + 1]` packets: tokens of a source for each expert of this rank; then its rows.
    Counts,
    /// `[ranks]` packets of combine: 0 answers follow, 1 released there, more: the room that was needed there.
    Signals,
    /// `[ranks][max_tokens]` epochs: set when the row of that source and slot has landed.
    RowFlags,
    /// `[ranks][max_tokens]` rows.
    Rows,
    /// `[ranks][max_tokens]` epochs: set when that rank's answer for its row with that slot has landed.
    AnswerFlags,
    /// `[ranks][max_tokens]` answers.
    Answers,
    /// What the calls of a rank share: the twin's words are named by [`StateWord`].
    State,
    /// `[max_tokens][ranks]` i32: the slot of a token at a rank, or -1.
    Slots,
    /// `[max_tokens][top_k]` i32: expert ids as they are used, masked ones -1 (bandwidth path).
    Ids,
    /// `[max_tokens][top_k]` i32: earlier tokens that name the expert; the twin's, of the same chunk (bandwidth
    /// path).
    Index,
    /// `[chunks][experts + ranks]` u32: tokens of a chunk that name an expert, or go to a rank; the twin's, of
    /// the chunks before it (bandwidth path).
    Histogram,
    /// `[ranks + 1]` u32: rows from each source; then the room that was needed, if there was less.
    Received,
    /// `[ranks][max_tokens][top_k]` of an i32 position, -1 for none, and an f32 weight: this rank's experts
    /// of a received row, in top-k order, from the front.
    Entries,
}

impl DeviceArea {
    /// All areas, in the order in which they lie.
    pub const ALL: [DeviceArea; 13] = [
        DeviceArea::Counts,
        DeviceArea::Signals,
        DeviceArea::RowFlags,
        DeviceArea::Rows,
        DeviceArea::AnswerFlags,
        DeviceArea::Answers,
        DeviceArea::State,
        DeviceArea::Slots,
        DeviceArea::Ids,
        DeviceArea::Index,
        DeviceArea::Histogram,
        DeviceArea::Received,
        DeviceArea::Entries,
    ];

    /// Its name in kernels, `WEFT_<name>_AT`.
    pub fn name(self) -> &'static str {
        match self {
            DeviceArea::Counts => "COUNTS",
            DeviceArea::Signals => "SIGNALS",
            DeviceArea::RowFlags => "ROW_FLAGS",
            DeviceArea::Rows => "ROWS",
            DeviceArea::AnswerFlags => "ANSWER_FLAGS",
            DeviceArea::Answers => "ANSWERS",
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

/// A word of the twin's [`DeviceArea::State`]: its number, counted in u32. Kernels count blocks there instead
/// (`State` in `moe/shape.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateWord {
    /// Rounds that each of four phases has ended; the first of four words.
    Epoch = 0,
    /// Calls that have begun, by phase.
    Entered = 4,
    /// Calls that have ended, by phase.
    Left = 8,
    /// Not 0 once the all-to-all was closed.
    Closed = 12,
}

/// Areas, rows and their parts. Offsets of areas count from the start of their channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Areas {
    extents: [Extent; DeviceArea::ALL.len()],
    channel_bytes: u64,
    /// Where the scales stand in a row.
    pub row_scales_at: u64,
    /// Where the metadata stand in a row: for each top-k slot the expert's global id (u16, 0xFFFF for none),
    /// the number of earlier tokens of the source that name it (u16), and the weight (f32).
    pub row_meta_at: u64,
    /// Bytes of a row, a multiple of 16.
    pub row_bytes: u64,
    /// Bytes from a row to the next; twice as many on the packets path.
    pub row_stride: u64,
    /// Bytes of an answer, a multiple of 16.
    pub answer_bytes: u64,
    /// Bytes from an answer to the next; twice as many on the packets path.
    pub answer_stride: u64,
}

impl Areas {
    pub(crate) fn new(
        config: &DeviceConfig,
        placement: &Placement,
        path: Path,
    ) -> Result<Areas, Error> {
        let wide = u64::from;
        let (ranks, tokens, top_k) =
            (wide(config.ranks), wide(config.max_tokens), wide(config.top_k));
        let hidden = wide(config.hidden);
        let local = wide(placement.most_local());

        let row_scales_at = (hidden * config.wire.bytes() as u64).next_multiple_of(PIECE);
        let scales = config.wire.scale_bytes(config.hidden as usize) as u64;
        let row_meta_at = row_scales_at + scales.next_multiple_of(PIECE);
        let row_bytes = (row_meta_at + top_k * RECORD).next_multiple_of(PIECE);
        let answer_bytes = hidden * config.answer_dtype.bytes() as u64;
        let double = if path == Path::Packets { 2 } else { 1 };
        let row_stride = double * row_bytes.next_multiple_of(ROW_ALIGNMENT);
        let answer_stride = double * answer_bytes.next_multiple_of(ROW_ALIGNMENT);

        let planned = if path == Path::Bandwidth { tokens } else { 0 };
        let chunks = planned.div_ceil(wide(CHUNK));
        let mut extents = [Extent::default(); DeviceArea::ALL.len()];
        let mut offset = 0u128;
        for (extent, area) in extents.iter_mut().zip(DeviceArea::ALL) {
            let (rows, stride) = match area {
                DeviceArea::Counts => (ranks, 8 * (local + 1)),
                DeviceArea::Signals => (ranks, 8),
                DeviceArea::RowFlags | DeviceArea::AnswerFlags => (ranks * tokens, 4),
                DeviceArea::Rows => (ranks * tokens, row_stride),
                DeviceArea::Answers => (ranks * tokens, answer_stride),
                DeviceArea::State => (1, AREA_ALIGNMENT),
                DeviceArea::Slots => (tokens, 4 * ranks),
                DeviceArea::Ids | DeviceArea::Index => (planned, 4 * top_k),
                DeviceArea::Histogram => (chunks, 4 * (wide(config.experts) + ranks)),
                DeviceArea::Received => (ranks + 1, 4),
                DeviceArea::Entries => (ranks * tokens, RECORD * top_k),
            };
            let end = offset
                + (u128::from(rows) * u128::from(stride)).next_multiple_of(AREA_ALIGNMENT.into());
            if stride > u64::from(u32::MAX) {
                return Err(Error::DeviceLimit {
                    field: "the bytes from a row to the next",
                    given: stride,
                    limit: u32::MAX.into(),
                    reason: "they are counted in 32 bits; lower hidden",
                });
            }
            if end > i64::MAX as u128 {
                return Err(Error::HeapTooLarge { needed: end, limit: i64::MAX as u64 });
            }
            *extent = Extent { offset: offset as u64, rows: rows as u32, stride: stride as u32 };
            offset = end;
        }
        Ok(Areas {
            extents,
            channel_bytes: offset as u64,
            row_scales_at,
            row_meta_at,
            row_bytes,
            row_stride,
            answer_bytes,
            answer_stride,
        })
    }

    /// Where an area lies in a channel, and the rows in it.
    pub fn extent(&self, area: DeviceArea) -> Extent {
        self.extents[area as usize]
    }

    /// Bytes of a channel.
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
    use crate::dtype::DType;
    use crate::float8::Float8;
    use crate::token_type::{BlockScaled, ScaleType, TokenType};
    use proptest::prelude::*;

    fn config() -> DeviceConfig {
        DeviceConfig::new(3, 0, 7, 2).sized(5, 48)
    }

    proptest! {
        #[test]
        fn areas_follow_each_other_and_are_the_same_on_every_rank(
            (ranks, experts, top_k) in (1u32..10, 1u32..40, 1u32..9),
            (max_tokens, sixteens) in (1u32..2000, 1u32..500),
            path in prop::option::of(Just(Path::Bandwidth)),
        ) {
            let config = DeviceConfig { path, ..DeviceConfig::new(ranks, 0, experts, top_k) };
            let config = config.sized(max_tokens, 16 * sixteens);
            let shape = DeviceShape::new(config.clone()).unwrap();
            let mut end = 0;
            for area in DeviceArea::ALL {
                let extent = shape.areas().extent(area);
                prop_assert_eq!(extent.offset, end, "{:?}", area);
                end = (extent.offset + extent.bytes()).next_multiple_of(AREA_ALIGNMENT);
            }
            prop_assert_eq!(end, shape.areas().channel_bytes());
            prop_assert_eq!(shape.heap_bytes(), 2 * end);
            prop_assert_eq!(shape.at(1, DeviceArea::Counts), end);
            let last = DeviceShape::new(DeviceConfig { rank: ranks - 1, ..config }).unwrap();
            prop_assert_eq!(last.areas(), shape.areas());
            prop_assert_eq!(last.defines(), shape.defines());
        }
    }

    #[test]
    fn rows_have_scales_and_metadata_behind_their_elements() {
        let scaled = BlockScaled { format: Float8::E4M3, scale: ScaleType::F32, block: 32 };
        let cast = DeviceConfig { wire: TokenType::Scaled(scaled), ..config() };
        let shape = DeviceShape::new(cast).unwrap();
        let areas = shape.areas();
        // 48 codes; two scales, in 16 bytes; two records.
        assert_eq!((areas.row_scales_at, areas.row_meta_at, areas.row_bytes), (48, 64, 80));
        assert_eq!((areas.answer_bytes, shape.token_bytes(), shape.scales()), (96, 96, 2));
        // Packets are twice as large.
        assert_eq!(
            (shape.path(), areas.row_stride, areas.answer_stride),
            (Path::Packets, 256, 256)
        );
        let plain = DeviceConfig { path: Some(Path::Latency), ..config() };
        let shape = DeviceShape::new(plain).unwrap();
        let areas = shape.areas();
        assert_eq!((areas.row_scales_at, areas.row_meta_at, areas.row_bytes), (96, 96, 112));
        assert_eq!((areas.row_stride, areas.answer_stride), (128, 128));
        assert_eq!(areas.extent(DeviceArea::Counts).bytes(), 3 * 8 * 4);
        assert_eq!(areas.extent(DeviceArea::Entries).bytes(), 3 * 5 * 2 * 8);
        assert_eq!(areas.extent(DeviceArea::Histogram).bytes(), 0);
    }

    #[test]
    fn the_plan_of_the_bandwidth_path_has_areas() {
        let config = DeviceConfig { path: Some(Path::Bandwidth), ..config().sized(65, 48) };
        let shape = DeviceShape::new(config).unwrap();
        assert_eq!(shape.areas().extent(DeviceArea::Ids).bytes(), 65 * 2 * 4);
        assert_eq!(shape.areas().extent(DeviceArea::Histogram).bytes(), 2 * (7 + 3) * 4);
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
