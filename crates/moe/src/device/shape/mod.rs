//! Shape of a device all-to-all: sizes and offsets that follow from a configuration.
//!
//! - `checks.rs`: configuration checks, and path selection
//! - `agreement.rs`: fields that the ranks compare
//! - `channel_layout.rs`: channel areas and row parts
//! - `replica_table.rs`: expert replica tables
//! - `defines.rs`: kernel macros
//! - this file: a checked configuration with the derived sizes

pub(super) mod agreement;
pub(super) mod channel_layout;
pub(super) mod checks;
mod defines;
pub(super) mod replica_table;

use crate::device::options::DeviceConfig;
use crate::device::options::types::{DeviceLayout, ScaleLayout, TransferPath};
use crate::device::shape::channel_layout::{AREA_ALIGNMENT, ChannelLayout, DeviceArea};
use crate::device::shape::checks::PIECE;
use crate::device::shape::replica_table::table_bytes;
use crate::error::Error;
use crate::shape::placement::Placement;
use std::fmt;

/// Layout for received scales: arrays with `columns` times `leading` elements, or with `rows` times
/// `columns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleArrays {
    /// Element size in bytes: one scale, or four.
    pub element: u64,
    /// Elements per row.
    pub columns: u64,
    /// Rows per array.
    pub rows: u64,
    /// Column stride, in elements; 0 for row-major arrays.
    pub leading: u64,
    /// Array count.
    pub groups: u64,
}

impl ScaleArrays {
    /// Total size in bytes.
    pub fn bytes(&self) -> u64 {
        self.groups * self.group_bytes()
    }

    /// Offset of element `column` at a position.
    pub fn at(&self, position: u64, column: u64) -> u64 {
        let (group, row) = (position / self.rows, position % self.rows);
        let element = match self.leading {
            0 => row * self.columns + column,
            leading => column * leading + row,
        };
        group * self.group_bytes() + element * self.element
    }

    fn group_bytes(&self) -> u64 {
        let rows = if self.leading > 0 { self.leading } else { self.rows };
        rows * self.columns * self.element
    }
}

/// Maximum number of positions: positions and slots are signed 32-bit numbers.
const MOST_POSITIONS: u64 = i32::MAX as u64;

/// Checked configuration, and the sizes and offsets that follow from it. `Display` prints a table.
#[derive(Clone, Debug)]
pub struct DeviceShape {
    config: DeviceConfig,
    placement: Placement,
    path: TransferPath,
    positions: u32,
    expert_capacity: u32,
    areas: ChannelLayout,
}

impl DeviceShape {
    /// Checks `config` and computes all sizes, without allocation.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::RankOutOfRange`], [`Error::DeviceLimit`], [`Error::Unsuitable`],
    /// [`Error::Cast`], [`Error::CastBlock`], [`Error::RowPieces`], or [`Error::HeapTooLarge`] with the
    /// excess.
    pub fn new(config: DeviceConfig) -> Result<DeviceShape, Error> {
        config.check()?;
        let path = config.choose_path()?;
        let placement = config.placement();
        let (positions, expert_capacity) = room(&config, &placement)?;
        let areas = ChannelLayout::new(&config, &placement, path)?;
        let shape = DeviceShape { config, placement, path, positions, expert_capacity, areas };
        let needed = shape.wide_heap_bytes();
        let limit = shape.config.max_bytes.unwrap_or(i64::MAX as u64);
        if needed > u128::from(limit) {
            return Err(Error::HeapTooLarge { needed, limit });
        }
        Ok(shape)
    }

    /// The configuration.
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Owner rank for each physical expert.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Row transfer path.
    pub fn path(&self) -> TransferPath {
        self.path
    }

    /// Largest expert count on a rank; each rank has this many groups.
    pub fn local_experts(&self) -> u32 {
        self.placement.most_local()
    }

    /// Positions on a rank: input and output rows for the experts, also in the dense layout.
    pub fn positions(&self) -> u32 {
        self.positions
    }

    /// Rows in one expert's group in the padded layout; 0 in the others.
    pub fn expert_capacity(&self) -> u32 {
        self.expert_capacity
    }

    /// Available room, for the error when a round needs more: group rows in the padded layout, positions in
    /// the others.
    pub fn room(&self) -> u32 {
        if self.expert_capacity > 0 { self.expert_capacity } else { self.positions }
    }

    /// Channel areas and row parts.
    pub fn channel_layout(&self) -> &ChannelLayout {
        &self.areas
    }

    /// Number of layers with a map; 0 without maps.
    pub fn layers(&self) -> u32 {
        self.config.maps.len() as u32
    }

    /// Offset from the first channel to `layer`'s table; `None` without maps.
    pub fn map_at(&self, layer: u32) -> Option<u64> {
        let behind = self.channel_at(self.config.channels);
        (layer < self.layers()).then(|| behind + u64::from(layer) * self.map_bytes())
    }

    /// Size of a layer's table in bytes.
    fn map_bytes(&self) -> u64 {
        table_bytes(self.config.experts).next_multiple_of(AREA_ALIGNMENT)
    }

    /// First byte in an area on `channel`, from the first channel.
    pub fn at(&self, channel: u32, area: DeviceArea) -> u64 {
        self.channel_at(channel) + self.areas.extent(area).offset
    }

    /// Number of `channel` among all channels in the domain; `first` is the number of this shape's first
    /// channel.
    pub(super) fn channel_number(&self, first: u32, channel: u32) -> u32 {
        let units = self.channel_at(channel) / AREA_ALIGNMENT;
        first.wrapping_add(units as u32)
    }

    /// First byte in a channel, from the first channel.
    pub fn channel_at(&self, channel: u32) -> u64 {
        u64::from(channel) * self.areas.channel_bytes()
    }

    /// Bytes in each rank's symmetric heap block.
    pub fn heap_bytes(&self) -> u64 {
        self.wide_heap_bytes() as u64
    }

    fn wide_heap_bytes(&self) -> u128 {
        u128::from(self.config.channels) * u128::from(self.areas.channel_bytes())
            + u128::from(self.layers()) * u128::from(self.map_bytes())
    }

    /// Input token size in bytes, without scales.
    pub fn token_bytes(&self) -> u64 {
        self.row(self.config.token_type.bytes())
    }

    /// Token size on the wire and as received in bytes, without scales.
    pub fn wire_bytes(&self) -> u64 {
        self.row(self.config.wire.bytes())
    }

    /// Scales per token on the wire; 0 if it has none.
    pub fn scales(&self) -> u32 {
        self.config.scaled().map_or(0, |scaled| scaled.blocks(self.config.hidden as usize) as u32)
    }

    /// Scale bytes per token on the wire; 0 if it has none.
    pub fn scale_bytes(&self) -> u64 {
        self.config.wire.scale_bytes(self.config.hidden as usize) as u64
    }

    /// Layout for received tokens' scales; elements have 0 bytes if tokens have no scales.
    pub fn received_scales(&self) -> ScaleArrays {
        let scale = self.config.scaled().map_or(0, |scaled| scaled.scale.bytes() as u64);
        let (element, columns) = match self.config.scale_layout {
            ScaleLayout::ColumnPacked => (4, u64::from(self.scales().div_ceil(4))),
            ScaleLayout::Row | ScaleLayout::Column => (scale, self.scales().into()),
        };
        let positions = u64::from(self.positions);
        if self.config.scale_layout == ScaleLayout::Row {
            return ScaleArrays { element, columns, rows: positions, leading: 0, groups: 1 };
        }
        let (rows, groups) = match self.expert_capacity {
            0 => (positions, 1),
            capacity => (capacity.into(), self.local_experts().into()),
        };
        let leading = rows.next_multiple_of(PIECE / element.max(1));
        ScaleArrays { element, columns, rows, leading, groups }
    }

    /// Expert output size in bytes.
    pub fn expert_output_bytes(&self) -> u64 {
        self.row(self.config.combine_dtype.bytes())
    }

    /// Reply size in bytes.
    pub fn reply_bytes(&self) -> u64 {
        self.row(self.config.reply_dtype.bytes())
    }

    /// Combined result row size in bytes.
    pub fn output_bytes(&self) -> u64 {
        self.row(self.config.output_dtype.bytes())
    }

    fn row(&self, element: usize) -> u64 {
        u64::from(self.config.hidden) * element as u64
    }
}

impl fmt::Display for DeviceShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.areas.write_table(f)?;
        let (channels, bytes) = (self.config.channels, self.heap_bytes());
        let each = self.areas.channel_bytes();
        writeln!(
            f,
            "{:<14} {:>12} {each:>10} {:>16}",
            "channels",
            channels,
            u64::from(channels) * each
        )?;
        if self.layers() > 0 {
            let (layers, each) = (self.layers(), self.map_bytes());
            let all = u64::from(layers) * each;
            writeln!(f, "{:<14} {layers:>12} {each:>10} {all:>16}", "placements")?;
        }
        write!(f, "{:<14} {:>12} {:>10} {bytes:>16}", "heap", "", "")
    }
}

/// Positions on a rank, and rows in one group in the padded layout.
fn room(config: &DeviceConfig, placement: &Placement) -> Result<(u32, u32), Error> {
    let wide = u64::from;
    let rows = wide(config.ranks) * wide(config.max_tokens);
    let local = wide(placement.most_local());
    let pairs = rows * wide(config.top_k).min(local);
    // One token fills a group's first `pad_to` rows; each further `pad_to` rows need `pad_to` tokens.
    let padded = |pad_to: u32| {
        let (pad_to, groups) = (wide(pad_to), local.min(pairs));
        let more = ((pairs - groups) / pad_to).min(groups * (rows.div_ceil(pad_to) - 1));
        u128::from(groups + more) * u128::from(pad_to)
    };
    let (worst, capacity) = match config.layout {
        DeviceLayout::Contiguous { pad_to } => (padded(pad_to), 0),
        DeviceLayout::Indexed => (pairs.into(), 0),
        DeviceLayout::Dense => (rows.into(), 0),
        DeviceLayout::Padded { expert_capacity } => {
            let capacity = expert_capacity.map_or(rows, |capacity| rows.min(wide(capacity)));
            (u128::from(local) * u128::from(capacity), capacity)
        }
    };
    let positions = config.max_positions.map_or(worst, |most| worst.min(most.into()));
    if positions > u128::from(MOST_POSITIONS) {
        let (field, given) = ("the number of positions", u64::try_from(positions));
        return Err(Error::DeviceLimit {
            field,
            given: given.unwrap_or(u64::MAX),
            limit: MOST_POSITIONS,
            reason: "they are 31-bit numbers; lower max_tokens, or pass max_positions or \
                     expert_capacity",
        });
    }
    Ok((positions as u32, capacity as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elements::float8::Float8;
    use crate::elements::token_type::{BlockScaled, ScaleType, TokenType};
    use crate::shape::config::Weighting;
    use proptest::prelude::*;

    fn config() -> DeviceConfig {
        DeviceConfig::new(4, 1, 10, 2).sized(6, 64)
    }

    fn positions(layout: DeviceLayout, max_positions: Option<u32>) -> u32 {
        let weighting = Weighting::AtExpert;
        let config = DeviceConfig { layout, max_positions, weighting, ..config() };
        DeviceShape::new(config).unwrap().positions()
    }

    #[test]
    fn the_default_room_is_that_of_the_worst_case() {
        // 24 rows with two experts each; three groups.
        assert_eq!(positions(DeviceLayout::Indexed, None), 48);
        assert_eq!(positions(DeviceLayout::Contiguous { pad_to: 1 }, None), 48);
        assert_eq!(positions(DeviceLayout::Dense, None), 24);
        assert_eq!(positions(DeviceLayout::Dense, Some(7)), 7);
        // 46 + 1 + 1 tokens make groups with 48, 8 and 8 rows.
        assert_eq!(positions(DeviceLayout::Contiguous { pad_to: 8 }, None), 64);
        assert_eq!(positions(DeviceLayout::Contiguous { pad_to: 8 }, Some(40)), 40);
        assert_eq!(positions(DeviceLayout::Padded { expert_capacity: None }, None), 72);
        assert_eq!(positions(DeviceLayout::Padded { expert_capacity: Some(5) }, None), 15);
        assert_eq!(positions(DeviceLayout::Padded { expert_capacity: Some(999) }, None), 72);
    }

    proptest! {
        /// The bound holds for every split of tokens over groups, and some split reaches it.
        #[test]
        fn padding_is_bounded_tightly(
            (ranks, experts, top_k) in (1u32..4, 1u32..8, 1u32..4),
            (max_tokens, pad_to) in (1u32..5, 1u32..10),
        ) {
            let layout = DeviceLayout::Contiguous { pad_to };
            let config = DeviceConfig { layout, ..DeviceConfig::new(ranks, 0, experts, top_k) };
            let shape = DeviceShape::new(config.sized(max_tokens, 16)).unwrap();
            let (rows, local) = (ranks * max_tokens, shape.local_experts());
            let pairs = rows * top_k.min(local);
            // The maximum over all groups' token counts.
            let mut most = vec![Some(0); pairs as usize + 1];
            for group in 0..local {
                most = (0..=pairs)
                    .map(|sum| {
                        let split = (0..=rows.min(sum)).filter_map(|tokens| {
                            let rest = most[(sum - tokens) as usize]?;
                            let fresh = group > 0 || sum == tokens;
                            fresh.then(|| rest + tokens.next_multiple_of(pad_to))
                        });
                        split.max()
                    })
                    .collect();
            }
            prop_assert_eq!(most.into_iter().flatten().max(), Some(shape.positions()));
        }
    }

    #[test]
    fn columns_of_scales_begin_at_multiples_of_16_bytes() {
        let scaled = |scale, layout, scale_layout| {
            let format = Float8::E4M3;
            let wire = TokenType::Scaled(BlockScaled { format, scale, block: 32 });
            // 192 elements have 6 scales.
            let config = DeviceConfig { wire, layout, scale_layout, ..config().sized(6, 192) };
            DeviceShape::new(config).map(|shape| shape.received_scales())
        };
        let contiguous = DeviceLayout::Contiguous { pad_to: 1 };
        let padded = DeviceLayout::Padded { expert_capacity: Some(5) };
        let (f32, ue8m0) = (ScaleType::F32, ScaleType::Ue8m0);
        let columns = |element, columns, rows, leading, groups| ScaleArrays {
            element,
            columns,
            rows,
            leading,
            groups,
        };
        assert_eq!(scaled(f32, contiguous, ScaleLayout::Row).unwrap(), columns(4, 6, 48, 0, 1));
        assert_eq!(scaled(f32, contiguous, ScaleLayout::Column).unwrap(), columns(4, 6, 48, 48, 1));
        assert_eq!(scaled(f32, padded, ScaleLayout::Column).unwrap(), columns(4, 6, 5, 8, 3));
        assert_eq!(scaled(ue8m0, padded, ScaleLayout::Column).unwrap(), columns(1, 6, 5, 16, 3));
        let packed = scaled(ue8m0, padded, ScaleLayout::ColumnPacked).unwrap();
        assert_eq!(packed, columns(4, 2, 5, 8, 3));
        assert_eq!((packed.bytes(), packed.at(6, 1)), (3 * 2 * 8 * 4, 2 * 8 * 4 + (8 + 1) * 4));
        for (refused, reason) in [
            (scaled(f32, padded, ScaleLayout::ColumnPacked), "float8_e8m0fnu"),
            (scaled(f32, DeviceLayout::Indexed, ScaleLayout::Column), "leaves scales in the rows"),
        ] {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains(reason), "{message}");
        }
        let plain = DeviceConfig { scale_layout: ScaleLayout::Column, ..config() };
        let message = DeviceShape::new(plain).unwrap_err().to_string();
        assert!(message.contains("have no scales"), "{message}");
    }

    #[test]
    fn a_heap_beyond_the_limit_is_rejected_with_the_excess() {
        let needed = DeviceShape::new(config()).unwrap().heap_bytes();
        let limited = DeviceConfig { max_bytes: Some(needed - 7), ..config() };
        let error = DeviceShape::new(limited).unwrap_err().to_string();
        assert!(error.contains(" 7 too many"), "{error}");
        assert!(DeviceShape::new(DeviceConfig { max_bytes: Some(needed), ..config() }).is_ok());
    }
}
