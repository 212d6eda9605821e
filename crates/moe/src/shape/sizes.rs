//! Rows and bytes in each area, computed before any allocation.

use std::fmt;

use crate::area::Area;
use crate::error::{Error, fits};
use crate::shape::config::{CombineMode, Config, Layout};
use crate::shape::placement::Placement;
use crate::shape::wire;

/// Area alignment, in bytes from the region start.
const AREA_ALIGNMENT: u64 = 64;
/// Row alignment, in bytes from the area start.
const ROW_ALIGNMENT: u64 = 16;

/// Channel areas; the arrival areas, which peers write, come first.
const AREAS: [Area; 9] = [
    Area::Headers,
    Area::Tokens,
    Area::Metadata,
    Area::Replies,
    Area::SendHeader,
    Area::SendMetadata,
    Area::Expert,
    Area::ExpertScales,
    Area::SendReplies,
];

/// Rows, strides and offsets for every area; equal on all ranks in a group. `Display` prints a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    channels: u64,
    receive_rows: u32,
    receive_pairs: u32,
    remainder_rows: u32,
    private_slots: u32,
    extents: [Extent; AREAS.len()],
}

/// An area's offset within the channel, and rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Extent {
    /// First byte, from the channel start.
    pub offset: u64,
    /// Row count.
    pub rows: u32,
    /// Bytes from the start of one row to the start of the next.
    pub stride: u32,
}

impl Extent {
    /// Size of all rows in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.stride)
    }
}

impl Sizes {
    pub(crate) fn new(config: &Config, placement: &Placement) -> Result<Sizes, Error> {
        let wide = u128::from;
        let (ranks, tokens) = (wide(config.ranks), wide(config.max_tokens));
        let top_k = wide(config.top_k);
        let private = wide(config.private_rows);
        let local = wide(placement.most_local());
        let local_pairs = top_k.min(local);

        let worst = ranks * tokens;
        let receive_rows = config.max_receive_rows.map_or(worst, |rows| worst.min(wide(rows)));
        let receive_pairs = receive_rows * local_pairs;
        // Only a source whose private rows are full has a remainder.
        let remainder_rows = (ranks * (tokens - private)).min(receive_rows.saturating_sub(private));
        let send_rows = tokens * top_k.min(wide(placement.owners()));
        let expert_rows = match config.layout {
            Layout::Contiguous { pad_to } => receive_pairs + local * (wide(pad_to) - 1),
            Layout::Indexed => 0,
        };
        let (send_reply_rows, reply_rows) = match config.combine {
            CombineMode::ReduceAtExpert => (receive_rows, send_rows),
            CombineMode::PerExpert => {
                (receive_pairs, tokens * top_k.min(wide(placement.experts())))
            }
        };
        let hidden = wide(config.hidden);
        let header = aligned(wire::header_bytes(config), ROW_ALIGNMENT);
        let scales = config.token_type.scale_bytes(config.hidden as usize) as u128;
        let metadata = wire::record_bytes(local_pairs, scales);
        let token = aligned(hidden * config.token_type.bytes() as u128, ROW_ALIGNMENT);
        // Packed rows' records follow the tokens in their write.
        let remainder_slots =
            remainder_rows + remainder_rows * metadata / token + ranks.min(remainder_rows);
        let private_slots = with_records(private, metadata, token);
        let slots = ranks * private_slots + remainder_slots;
        let reply = aligned(hidden * config.reply_dtype.bytes() as u128, ROW_ALIGNMENT);

        let mut extents = [Extent::default(); AREAS.len()];
        let mut offset = 0;
        for (extent, area) in extents.iter_mut().zip(AREAS) {
            let (rows, stride) = match area {
                Area::SendHeader => (1, header),
                Area::Headers => (ranks, header),
                Area::SendMetadata => (send_rows, metadata),
                Area::Tokens => (slots, token),
                Area::Metadata => (slots, metadata),
                Area::Expert => (expert_rows, token),
                Area::ExpertScales if scales == 0 => (0, 0),
                Area::ExpertScales => (expert_rows, aligned(scales, ROW_ALIGNMENT)),
                Area::SendReplies => (send_reply_rows, reply),
                Area::Replies => (reply_rows, reply),
                Area::Input | Area::ExpertOutput | Area::Output => continue,
            };
            // One number is reserved: it marks an absent row.
            fits("area rows", rows, u64::from(u32::MAX) - 1)?;
            fits("row bytes", stride, u64::from(u32::MAX))?;
            let end = offset + aligned(rows * stride, AREA_ALIGNMENT);
            fits("channel bytes", end, i64::MAX as u64)?;
            *extent = Extent { offset: offset as u64, rows: rows as u32, stride: stride as u32 };
            offset = end;
        }
        // Pairs are 32-bit numbers as well.
        fits("expert ids in a batch", tokens * top_k, wire::MOST_MARKED)?;
        fits("pairs that a rank receives", receive_pairs, u64::from(u32::MAX) - 1)?;
        let limit = config.max_bytes.unwrap_or(i64::MAX as u64);
        fits("bytes in all channels", offset * wide(config.channels), limit)?;
        Ok(Sizes {
            channels: config.channels.into(),
            receive_rows: receive_rows as u32,
            receive_pairs: receive_pairs as u32,
            remainder_rows: remainder_rows as u32,
            private_slots: private_slots as u32,
            extents,
        })
    }

    /// Extent of `area` in a channel. The caller's own arrays have none: zero rows.
    pub fn extent(&self, area: Area) -> Extent {
        AREAS.iter().position(|a| *a == area).map_or(Extent::default(), |at| self.extents[at])
    }

    /// Maximum number of rows that a rank receives in one round.
    pub fn receive_rows(&self) -> u32 {
        self.receive_rows
    }

    /// Maximum number of (token, expert) pairs that a rank receives in one round.
    pub fn receive_pairs(&self) -> u32 {
        self.receive_pairs
    }

    /// Rows in the shared remainder.
    pub fn remainder_rows(&self) -> u32 {
        self.remainder_rows
    }

    /// Slots for a write with `rows` rows: one for each token, and the slots that packed records take
    /// behind them.
    pub fn slots_of(&self, rows: u32) -> u32 {
        let stride = |area| u64::from(self.extent(area).stride);
        let records = u64::from(rows) * stride(Area::Metadata);
        rows + records.div_ceil(stride(Area::Tokens)) as u32
    }

    /// Slots for one source's private rows.
    pub fn private_slots(&self) -> u32 {
        self.private_slots
    }

    /// Channel size in bytes.
    pub fn channel_bytes(&self) -> u64 {
        self.extents.iter().map(|extent| extent.bytes().next_multiple_of(AREA_ALIGNMENT)).sum()
    }

    /// Size of all channels in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.channels * self.channel_bytes()
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<18} {:>12} {:>10} {:>16}", "area", "rows", "stride", "bytes")?;
        for (extent, area) in self.extents.iter().zip(AREAS) {
            let bytes = extent.bytes();
            writeln!(f, "{area:<18} {:>12} {:>10} {bytes:>16}", extent.rows, extent.stride)?;
        }
        let (each, all) = (self.channel_bytes(), self.total_bytes());
        write!(f, "{:<18} {:>12} {:>10} {all:>16}", "total", self.channels, each)
    }
}

/// Slots for a run of rows with the records behind them.
fn with_records(rows: u128, record: u128, token: u128) -> u128 {
    rows + (rows * record).div_ceil(token)
}

fn aligned(bytes: u128, alignment: u64) -> u128 {
    bytes.next_multiple_of(u128::from(alignment))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elements::float8::Float8;
    use crate::elements::token_type::{BlockScaled, ScaleType, TokenType};
    use crate::shape::Shape;
    use proptest::prelude::*;

    #[test]
    fn areas_follow_each_other_without_overlap() {
        let config = Config { private_rows: 3, ..Config::new(3, 1, 7, 2).sized(5, 9) };
        let shape = Shape::new(config).unwrap();
        let sizes = shape.sizes();
        let mut end = 0;
        for area in AREAS {
            let extent = sizes.extent(area);
            assert_eq!(extent.offset, end, "{area}");
            assert_eq!(extent.offset % AREA_ALIGNMENT, 0);
            end = (extent.offset + extent.bytes()).next_multiple_of(AREA_ALIGNMENT);
        }
        assert_eq!(end, sizes.channel_bytes());
        assert_eq!(sizes.total_bytes(), 2 * end);
        // Nine float32 are 36 bytes; rows are multiples of 16.
        assert_eq!(sizes.extent(Area::Tokens).stride, 48);
        // Records are 20 bytes: three rows' records take two slots. Each source leaves at most one slot
        // unfilled.
        assert_eq!(sizes.slots_of(3), 5);
        assert_eq!(sizes.extent(Area::Tokens).rows, 3 * 5 + (3 * 2 + 2 + 3));
        assert_eq!(sizes.extent(Area::SendMetadata).rows, 5 * 2);
        assert_eq!(sizes.extent(Area::Expert).rows, 15 * 2);
    }

    #[test]
    fn scales_take_room_in_the_records_and_by_expert() {
        let plain = Config::new(2, 0, 4, 2).sized(6, 300);
        let shape = |scale, block| {
            let scaled = BlockScaled { format: Float8::E4M3, scale, block };
            let token_type = TokenType::Scaled(scaled);
            Shape::new(Config { token_type, ..plain.clone() }).unwrap()
        };
        let plain = Shape::new(plain.clone()).unwrap();
        // A count and two entries; no scales.
        assert_eq!(plain.sizes().extent(Area::Metadata).stride, 4 + 2 * 8);
        assert_eq!(plain.sizes().extent(Area::ExpertScales).bytes(), 0);
        assert!(plain.scales_in_record().is_empty());
        for (scale, block, bytes, stride) in [
            (ScaleType::F32, 128, 12, 16),
            (ScaleType::F32, 300, 4, 16),
            (ScaleType::F32, 1000, 4, 16),
            (ScaleType::Ue8m0, 128, 3, 16),
            (ScaleType::Ue8m0, 16, 19, 32),
            (ScaleType::F32, 1, 1200, 1200),
        ] {
            let shape = shape(scale, block);
            let sizes = shape.sizes();
            assert_eq!(shape.scale_bytes(), bytes);
            assert_eq!(shape.scales_in_record(), 32..32 + bytes);
            assert_eq!(sizes.extent(Area::Metadata).stride, 32 + stride);
            assert_eq!(sizes.extent(Area::SendMetadata).stride, 32 + stride);
            assert_eq!(sizes.extent(Area::ExpertScales).stride, stride);
            let experts = sizes.extent(Area::Expert);
            assert_eq!((experts.rows, experts.stride), (24, 304));
            assert_eq!(sizes.extent(Area::ExpertScales).rows, experts.rows);
            assert_eq!(sizes.extent(Area::Tokens).stride, 304);
        }
    }

    #[test]
    fn a_capacity_below_the_worst_case_shrinks_the_dependent_sizes() {
        let worst = Config::new(4, 0, 8, 2).sized(100, 8);
        let tight = Config { max_receive_rows: Some(120), ..worst.clone() };
        let tight = Shape::new(tight).unwrap();
        assert_eq!(tight.sizes().receive_rows(), 120);
        assert_eq!(tight.sizes().remainder_rows(), 120 - 32);
        assert_eq!(tight.sizes().extent(Area::SendReplies).rows, 120);
        let worst = Shape::new(worst).unwrap();
        assert_eq!(worst.sizes().receive_rows(), 400);
        assert_eq!(worst.sizes().remainder_rows(), 4 * 68);
        assert!(tight.sizes().total_bytes() < worst.sizes().total_bytes());
    }

    proptest! {
        #[test]
        fn every_split_of_the_remainder_finds_its_slots(
            ranks in 1u32..5,
            max_tokens in 1u32..20,
            private_rows in 0u32..20,
            hidden in 1u32..40,
            top_k in 1u32..9,
            rows in prop::collection::vec(0u32..20, 4),
        ) {
            let config = Config::new(ranks, 0, 9, top_k).sized(max_tokens, hidden);
            let shape = Shape::new(Config { private_rows, ..config }).unwrap();
            let (sizes, private) = (shape.sizes(), shape.config().private_rows);
            let remainder = |rows: &u32| (*rows).min(max_tokens).saturating_sub(private);
            let split = rows.iter().take(ranks as usize).map(remainder);
            let slots = split.map(|rows| sizes.slots_of(rows)).sum::<u32>();
            prop_assert_eq!(sizes.private_slots(), sizes.slots_of(private));
            let slots = slots + ranks * sizes.private_slots();
            prop_assert!(slots <= sizes.extent(Area::Tokens).rows);
        }
    }

    #[test]
    fn the_table_names_every_area_and_the_total() {
        let shape = Shape::new(Config::new(2, 0, 4, 2).sized(4, 16)).unwrap();
        let table = shape.sizes().to_string();
        for area in AREAS {
            assert!(table.contains(&area.to_string()));
        }
        assert!(table.ends_with(&shape.sizes().total_bytes().to_string()), "{table}");
    }
}
