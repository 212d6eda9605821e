//! Every size and every place that follows from a configuration.

use std::fmt;

use crate::device::areas::{Areas, DeviceArea};
use crate::device::config::{DeviceConfig, DeviceLayout, Path};
use crate::error::Error;
use crate::placement::Placement;

/// Positions and slots are signed 32-bit numbers.
const MOST_POSITIONS: u64 = i32::MAX as u64;

/// A configuration that was found to be possible, and what follows from it. `Display` prints a table.
#[derive(Clone, Debug)]
pub struct DeviceShape {
    config: DeviceConfig,
    placement: Placement,
    path: Path,
    positions: u32,
    expert_capacity: u32,
    areas: Areas,
}

impl DeviceShape {
    /// Checks `config` and computes every size; allocates nothing.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::RankOutOfRange`], [`Error::DeviceLimit`], [`Error::Unsuitable`],
    /// [`Error::Cast`], [`Error::CastBlock`], [`Error::RowPieces`], or [`Error::HeapTooLarge`], which
    /// says by how much.
    pub fn new(config: DeviceConfig) -> Result<DeviceShape, Error> {
        config.check()?;
        let path = config.choose_path()?;
        let placement = Placement::new(config.ranks, config.experts);
        let (positions, expert_capacity) = room(&config, &placement)?;
        let areas = Areas::new(&config, &placement, path)?;
        let shape = DeviceShape { config, placement, path, positions, expert_capacity, areas };
        let needed = shape.wide_heap_bytes();
        let limit = shape.config.max_bytes.unwrap_or(i64::MAX as u64);
        if needed > u128::from(limit) {
            return Err(Error::HeapTooLarge { needed, limit });
        }
        Ok(shape)
    }

    /// What was asked for.
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Which rank owns which expert.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// How rows travel.
    pub fn path(&self) -> Path {
        self.path
    }

    /// The most experts that any rank owns: groups of every rank are numbered up to this.
    pub fn local_experts(&self) -> u32 {
        self.placement.most_local()
    }

    /// Positions that a rank has room for: rows of the experts' input and output.
    pub fn positions(&self) -> u32 {
        self.positions
    }

    /// Tokens that one expert's group has room for in the padded layout; 0 in the others.
    pub fn expert_capacity(&self) -> u32 {
        self.expert_capacity
    }

    /// What a round that needs more is told it had: the room of a group in the padded layout, positions
    /// in the others.
    pub fn room(&self) -> u32 {
        if self.expert_capacity > 0 { self.expert_capacity } else { self.positions }
    }

    /// Where a channel's areas lie, and the parts of a row.
    pub fn areas(&self) -> &Areas {
        &self.areas
    }

    /// The first byte of an area of `channel`, counted from the first channel.
    pub fn at(&self, channel: u32, area: DeviceArea) -> u64 {
        self.channel_at(channel) + self.areas.extent(area).offset
    }

    /// The first byte of a channel, counted from the first one.
    pub fn channel_at(&self, channel: u32) -> u64 {
        u64::from(channel) * self.areas.channel_bytes()
    }

    /// Bytes of each rank's part of the symmetric heap.
    pub fn heap_bytes(&self) -> u64 {
        self.wide_heap_bytes() as u64
    }

    fn wide_heap_bytes(&self) -> u128 {
        u128::from(self.config.channels) * u128::from(self.areas.channel_bytes())
    }

    /// Bytes of one token as the caller gives it, without scales.
    pub fn token_bytes(&self) -> u64 {
        self.row(self.config.token_type.bytes())
    }

    /// Bytes of one token as it travels and as experts find it, without scales.
    pub fn wire_bytes(&self) -> u64 {
        self.row(self.config.wire.bytes())
    }

    /// Scales of one token on its way; 0 if it has none.
    pub fn scales(&self) -> u32 {
        self.config.scaled().map_or(0, |scaled| scaled.blocks(self.config.hidden as usize) as u32)
    }

    /// Bytes of the scales of one token on its way; 0 if it has none.
    pub fn scale_bytes(&self) -> u64 {
        self.config.wire.scale_bytes(self.config.hidden as usize) as u64
    }

    /// Bytes of one expert output.
    pub fn expert_output_bytes(&self) -> u64 {
        self.row(self.config.combine_dtype.bytes())
    }

    /// Bytes of one answer.
    pub fn answer_bytes(&self) -> u64 {
        self.row(self.config.answer_dtype.bytes())
    }

    /// Bytes of one row of the combined result.
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
        writeln!(f, "{:<14} {:>12} {each:>10} {:>16}", "channels", channels, bytes)?;
        write!(f, "{:<14} {:>12} {:>10} {bytes:>16}", "heap", "", "")
    }
}

/// Positions of a rank, and tokens of one group in the padded layout.
fn room(config: &DeviceConfig, placement: &Placement) -> Result<(u32, u32), Error> {
    let wide = u64::from;
    let rows = wide(config.ranks) * wide(config.max_tokens);
    let local = wide(placement.most_local());
    let pairs = rows * wide(config.top_k).min(local);
    // Of a group's first multiple of rows one token takes all, of the next ones as many as they hold.
    let padded = |pad_to: u32| {
        let (pad_to, groups) = (wide(pad_to), local.min(pairs));
        let more = ((pairs - groups) / pad_to).min(groups * (rows.div_ceil(pad_to) - 1));
        u128::from(groups + more) * u128::from(pad_to)
    };
    let (worst, capacity) = match config.layout {
        DeviceLayout::Contiguous { pad_to } => (padded(pad_to), 0),
        DeviceLayout::Indexed => (pairs.into(), 0),
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
            reason: "they are counted in 31 bits; lower max_tokens, or give max_positions or \
                     expert_capacity",
        });
    }
    Ok((positions as u32, capacity as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config() -> DeviceConfig {
        DeviceConfig::new(4, 1, 10, 2).sized(6, 64)
    }

    fn positions(layout: DeviceLayout, max_positions: Option<u32>) -> u32 {
        DeviceShape::new(DeviceConfig { layout, max_positions, ..config() }).unwrap().positions()
    }

    #[test]
    fn there_is_room_for_the_worst_case_and_no_more() {
        // 24 rows of two experts each; three groups.
        assert_eq!(positions(DeviceLayout::Indexed, None), 48);
        assert_eq!(positions(DeviceLayout::Contiguous { pad_to: 1 }, None), 48);
        // 46 + 1 + 1 tokens make groups of 48, 8 and 8.
        assert_eq!(positions(DeviceLayout::Contiguous { pad_to: 8 }, None), 64);
        assert_eq!(positions(DeviceLayout::Contiguous { pad_to: 8 }, Some(40)), 40);
        assert_eq!(positions(DeviceLayout::Padded { expert_capacity: None }, None), 72);
        assert_eq!(positions(DeviceLayout::Padded { expert_capacity: Some(5) }, None), 15);
        assert_eq!(positions(DeviceLayout::Padded { expert_capacity: Some(999) }, None), 72);
    }

    proptest! {
        /// No split of tokens over groups needs more, and some split needs all of it.
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
            // The most by trying every number of tokens of every group.
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
    fn a_heap_beyond_the_limit_says_by_how_much() {
        let needed = DeviceShape::new(config()).unwrap().heap_bytes();
        let limited = DeviceConfig { max_bytes: Some(needed - 7), ..config() };
        let error = DeviceShape::new(limited).unwrap_err().to_string();
        assert!(error.contains(" 7 too many"), "{error}");
        assert!(DeviceShape::new(DeviceConfig { max_bytes: Some(needed), ..config() }).is_ok());
    }
}
