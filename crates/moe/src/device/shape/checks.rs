//! Device configuration checks, and path selection.

use crate::device::options::DeviceConfig;
use crate::device::options::types::{DeviceLayout, ScaleLayout, TransferPath};
use crate::elements::float8::Float8;
use crate::elements::token_type::{BlockScaled, ScaleType, TokenType};
use crate::error::Error;
use crate::shape::config::Weighting;
use crate::shape::expert_map::ExpertMap;
use crate::shape::placement::Placement;
use std::sync::Arc;

/// Maximum number of ranks: more than any host has GPUs.
pub(crate) const MOST_RANKS: u64 = 64;
/// Maximum number of ids per token: one for each lane in a warp.
const MOST_TOP_K: u64 = 32;
/// Maximum number of experts: a batch plan counts them in a block's shared memory, and row metadata has
/// 16 bits for the id.
const MOST_EXPERTS: u64 = 0x1FFF;
/// Maximum number of experts on a rank: a block keeps state for each in shared memory.
const MOST_LOCAL: u64 = 1024;
/// Maximum padding, so that offsets stay within 32 bits.
const MOST_PAD: u64 = 1 << 16;
/// Maximum number of tokens: a token's index within its expert has 16 bits in the metadata.
const MOST_TOKENS: u64 = 1 << 16;
/// Largest batch on the packets path, by default.
const PACKET_TOKENS: u32 = 8;
/// Largest batch, and largest id count, that a sender plans by itself.
const LATENCY_TOKENS: u32 = 1024;
const LATENCY_IDS: u64 = 8192;
/// Chunk size in bytes, the unit for row copies.
pub(crate) const PIECE: u64 = 16;
/// Block sizes for casts.
const CAST_BLOCKS: [u32; 4] = [32, 64, 128, 256];

impl DeviceConfig {
    /// A configuration with the defaults: bfloat16 throughout, contiguous layout without padding, weights
    /// applied by combine, two channels, worst-case capacity.
    pub fn new(ranks: u32, rank: u32, experts: u32, top_k: u32) -> DeviceConfig {
        let maps = Arc::default();
        DeviceConfig { experts, top_k, ..DeviceConfig::defaults(ranks, rank, maps) }
    }

    /// The configuration with another batch and token size.
    pub fn sized(self, max_tokens: u32, hidden: u32) -> DeviceConfig {
        DeviceConfig { max_tokens, hidden, ..self }
    }

    /// The configuration with another token type, on the wire too.
    pub fn tokens(self, token_type: TokenType) -> DeviceConfig {
        DeviceConfig { token_type, wire: token_type, ..self }
    }

    /// Token scales on the wire, if there are any.
    pub fn scaled(&self) -> Option<BlockScaled> {
        match self.wire {
            TokenType::Plain(_) => None,
            TokenType::Scaled(scaled) => Some(scaled),
        }
    }

    /// True if the device casts tokens to 8-bit floats.
    pub fn casts(&self) -> bool {
        self.token_type != self.wire
    }

    /// Rejects configurations beyond the kernels' limits.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let pad_to = match self.layout {
            DeviceLayout::Contiguous { pad_to } => pad_to,
            _ => 1,
        };
        let capacity = match self.layout {
            DeviceLayout::Padded { expert_capacity: Some(capacity) } => capacity,
            _ => 1,
        };
        let positive = [
            ("ranks", self.ranks),
            ("experts", self.experts),
            ("top_k", self.top_k),
            ("hidden", self.hidden),
            ("max_tokens", self.max_tokens),
            ("channels", self.channels),
            ("pad_to", pad_to),
            ("expert_capacity", capacity),
            ("max_positions", self.max_positions.unwrap_or(1)),
            ("block", self.token_type.block().unwrap_or(1)),
            ("block", self.wire.block().unwrap_or(1)),
        ];
        if let Some(&(field, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(Error::Zero { field });
        }
        if self.rank >= self.ranks {
            return Err(Error::RankOutOfRange { rank: self.rank, ranks: self.ranks });
        }
        for (layer, map) in (0..).zip(&*self.maps) {
            self.check_map(layer, map)?;
        }
        let placement = self.placement();
        let limits = [
            ("ranks", self.ranks, MOST_RANKS, "they are GPUs on one host"),
            ("top_k", self.top_k, MOST_TOP_K, "a warp takes a token's ids, one per lane"),
            ("experts", self.experts, MOST_EXPERTS, "a block counts them in shared memory"),
            (
                "physical experts",
                placement.experts(),
                MOST_EXPERTS,
                "a block counts them in shared memory",
            ),
            (
                "max_tokens",
                self.max_tokens,
                MOST_TOKENS,
                "an expert's tokens are counted in 16 bits",
            ),
            ("pad_to", pad_to, MOST_PAD, "offsets have 32 bits"),
            (
                "experts of a rank",
                placement.most_local(),
                MOST_LOCAL,
                "a block keeps the counts in shared memory",
            ),
        ];
        for (field, given, limit, reason) in limits {
            if u64::from(given) > limit {
                let given = given.into();
                return Err(Error::DeviceLimit { field, given, limit, reason });
            }
        }
        if let (DeviceLayout::Padded { .. }, Some(_)) = (self.layout, self.max_positions) {
            return Err(Error::Unsuitable {
                what: "max_positions",
                reason: "the padded layout has a capacity for each expert: pass expert_capacity instead",
            });
        }
        self.check_scales()?;
        if self.layout == DeviceLayout::Dense && self.weighting == Weighting::AtCombine {
            return Err(Error::Unsuitable {
                what: "weighting combine",
                reason: "a dense output row is the sum over experts that have applied the weights: use weighting expert",
            });
        }
        self.check_cast()?;
        self.check_rows()
    }

    fn check_scales(&self) -> Result<(), Error> {
        let reason = match (self.scale_layout, self.scaled()) {
            (ScaleLayout::Row, _) => return Ok(()),
            (_, None) => "tokens on the wire have no scales: pass wire_dtype='float8_e4m3fn'",
            _ if self.layout == DeviceLayout::Indexed => {
                "the indexed layout leaves scales in the rows: use contiguous or padded"
            }
            (ScaleLayout::ColumnPacked, Some(scaled)) if scaled.scale != ScaleType::Ue8m0 => {
                "it packs 8-bit scales: pass scale_dtype='float8_e8m0fnu', or use column"
            }
            _ => return Ok(()),
        };
        let what = match self.scale_layout {
            ScaleLayout::ColumnPacked => "scale_layout column_packed",
            _ => "scale_layout column",
        };
        Err(Error::Unsuitable { what, reason })
    }

    /// Owner rank for each physical expert.
    pub fn placement(&self) -> Placement {
        match self.maps.first() {
            Some(map) => map.placement().clone(),
            None => Placement::new(self.ranks, self.experts),
        }
    }

    /// Rejects a map for `layer` with other experts, or with other numbers of physical experts.
    pub(crate) fn check_map(&self, layer: u32, map: &ExpertMap) -> Result<(), Error> {
        let placement = self.placement();
        let counts = |placement: &Placement| -> Vec<usize> {
            (0..placement.ranks()).map(|rank| placement.experts_of(rank).len()).collect()
        };
        let (ranks, given) = (self.ranks, map.placement().ranks());
        let refuse = |what, given: String, expected: String| {
            Err(Error::MapShape { layer, what, given, expected })
        };
        if map.experts() != self.experts {
            return refuse("experts", map.experts().to_string(), self.experts.to_string());
        }
        if given != ranks {
            return refuse("ranks", given.to_string(), ranks.to_string());
        }
        if *map.placement() != placement {
            let (given, expected) = (counts(map.placement()), counts(&placement));
            let what = "physical experts by rank";
            return refuse(what, format!("{given:?}"), format!("{expected:?}"));
        }
        Ok(())
    }

    fn check_cast(&self) -> Result<(), Error> {
        if !self.casts() {
            return Ok(());
        }
        match (self.token_type, self.wire) {
            (TokenType::Plain(_), TokenType::Scaled(scaled)) if scaled.format == Float8::E4M3 => {
                let block = scaled.block;
                if CAST_BLOCKS.contains(&block) { Ok(()) } else { Err(Error::CastBlock { block }) }
            }
            (token, wire) => Err(Error::Cast { token, wire }),
        }
    }

    /// Checks that rows consist of 16-byte chunks.
    fn check_rows(&self) -> Result<(), Error> {
        let rows = [
            ("tokens", self.token_type.bytes()),
            ("tokens on the wire", self.wire.bytes()),
            ("expert outputs", self.combine_dtype.bytes()),
            ("replies", self.reply_dtype.bytes()),
            ("the combined result", self.output_dtype.bytes()),
        ];
        // The narrowest type is decisive, so the error names it.
        let narrowest = rows.into_iter().min_by_key(|(_, bytes)| *bytes);
        if let Some((what, bytes)) = narrowest {
            let row = u64::from(self.hidden) * bytes as u64;
            if !row.is_multiple_of(PIECE) {
                let multiple = PIECE / bytes as u64;
                return Err(Error::RowPieces { what, bytes: row, multiple });
            }
        }
        Ok(())
    }

    pub(crate) fn choose_path(&self) -> Result<TransferPath, Error> {
        let ids = u64::from(self.max_tokens) * u64::from(self.top_k);
        let plans_itself = self.max_tokens <= LATENCY_TOKENS && ids <= LATENCY_IDS;
        // Experts cannot read packets in place.
        let indexed = self.layout == DeviceLayout::Indexed;
        match self.path {
            None if self.max_tokens <= PACKET_TOKENS && !indexed => Ok(TransferPath::Packets),
            None if plans_itself => Ok(TransferPath::Latency),
            None | Some(TransferPath::Bandwidth) => Ok(TransferPath::Bandwidth),
            Some(TransferPath::Packets) if indexed => Err(Error::Unsuitable {
                what: "path packets",
                reason: "the indexed layout leaves rows in place, and experts cannot read packets: \
                         use latency or bandwidth",
            }),
            Some(TransferPath::Packets | TransferPath::Latency) if !plans_itself => {
                Err(Error::Unsuitable {
                    what: "path packets or latency",
                    reason: "it supports batches of at most 1024 tokens and 8192 expert ids: use bandwidth",
                })
            }
            Some(path) => Ok(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceShape;
    use crate::elements::dtype::DType;
    use crate::elements::token_type::ScaleType;

    fn config() -> DeviceConfig {
        DeviceConfig::new(4, 1, 10, 2).sized(6, 64)
    }

    fn refusal(config: DeviceConfig) -> String {
        DeviceShape::new(config).unwrap_err().to_string()
    }

    fn wire(format: Float8, block: u32) -> TokenType {
        TokenType::Scaled(BlockScaled { format, scale: ScaleType::F32, block })
    }

    #[test]
    fn a_configuration_beyond_the_kernels_limits_is_rejected_with_the_reason() {
        let padded = DeviceLayout::Padded { expert_capacity: None };
        let none = DeviceLayout::Padded { expert_capacity: Some(0) };
        let most = u32::MAX;
        for (config, words) in [
            (DeviceConfig { top_k: 0, ..config() }, "top_k is 0"),
            (DeviceConfig { channels: 0, ..config() }, "channels is 0"),
            (DeviceConfig { layout: none, ..config() }, "expert_capacity is 0"),
            (DeviceConfig { max_positions: Some(0), ..config() }, "max_positions is 0"),
            (DeviceConfig { wire: wire(Float8::E4M3, 0), ..config() }, "block is 0"),
            (DeviceConfig { rank: 4, ..config() }, "rank 4 is outside"),
            (DeviceConfig { ranks: 65, ..config() }, "ranks is 65; on a device it is at most 64"),
            (DeviceConfig { top_k: 33, ..config() }, "top_k is 33"),
            (DeviceConfig { experts: 1 << 16, ..config() }, "experts is 65536"),
            (DeviceConfig { max_tokens: (1 << 16) + 1, ..config() }, "max_tokens is 65537"),
            (
                DeviceConfig { layout: padded, max_positions: Some(9), ..config() },
                "pass expert_capacity",
            ),
            (
                DeviceConfig { wire: wire(Float8::E5M2, 128), ..config() },
                "tokens of bfloat16 cannot travel as float8_e5m2",
            ),
            (DeviceConfig { wire: DType::F16.into(), ..config() }, "cannot travel as float16"),
            (config().tokens(wire(Float8::E4M3, 8)), ""),
            (DeviceConfig { wire: wire(Float8::E4M3, 48), ..config() }, "blocks of 48 elements"),
            (
                config().sized(6, 60),
                "a row of tokens has 120 bytes; on a device rows are multiples of 16 bytes",
            ),
            (
                DeviceConfig { wire: wire(Float8::E4M3, 32), ..config().sized(6, 40) },
                "a row of tokens on the wire has 40 bytes",
            ),
            (
                DeviceConfig {
                    path: Some(TransferPath::Packets),
                    layout: DeviceLayout::Indexed,
                    ..config()
                },
                "packets",
            ),
            (DeviceConfig { layout: DeviceLayout::Dense, ..config() }, "use weighting expert"),
            (
                DeviceConfig { path: Some(TransferPath::Latency), ..config().sized(1025, 64) },
                "at most 1024 tokens",
            ),
            (DeviceConfig { experts: most - 1, hidden: most, ..config() }, "experts is 4294967294"),
            (config().sized(1 << 16, most - 15), "lower hidden"),
            (DeviceConfig { channels: most, ..config().sized(1 << 16, 1 << 20) }, "too many"),
            (
                DeviceConfig { layout: DeviceLayout::Contiguous { pad_to: most }, ..config() },
                "pad_to is 4294967295; on a device it is at most 65536",
            ),
        ] {
            if words.is_empty() {
                assert!(DeviceShape::new(config).is_ok());
            } else {
                let refusal = refusal(config);
                assert!(refusal.contains(words), "{refusal}");
            }
        }
    }

    #[test]
    fn maps_of_layers_are_of_the_same_experts_and_numbers() {
        let map = |experts, ranks: &[&[u32]]| {
            let ranks: Vec<Vec<u32>> = ranks.iter().map(|held| held.to_vec()).collect();
            ExpertMap::new(experts, &ranks).unwrap()
        };
        let made = |maps: &[ExpertMap]| {
            let maps = maps.iter().cloned().collect();
            DeviceConfig { maps, ..DeviceConfig::new(2, 0, 3, 2) }
        };
        let first = map(3, &[&[0, 1], &[2, 0, 0]]);
        let shape =
            DeviceShape::new(made(&[first.clone(), map(3, &[&[2, 2], &[2, 1, 0]])])).unwrap();
        assert_eq!((shape.layers(), shape.local_experts(), shape.placement().experts()), (2, 3, 5));
        for (other, words) in [
            (map(4, &[&[0, 1], &[2, 3, 0]]), "the placement of layer 1 has experts 4"),
            (
                map(3, &[&[0, 1, 2], &[2, 0]]),
                "physical experts by rank [3, 2]; this all-to-all was created with [2, 3]",
            ),
            (map(3, &[&[0, 1], &[2, 0, 0], &[]]), "has ranks 3"),
        ] {
            let refusal = refusal(made(&[first.clone(), other]));
            assert!(refusal.contains(words), "{refusal}");
        }
        let many = map(1, &[&[0; 60], &[0]]);
        let config = DeviceConfig { maps: [many].into(), ..DeviceConfig::new(2, 0, 1, 1) };
        assert_eq!(DeviceShape::new(config).unwrap().local_experts(), 60);
    }

    #[test]
    fn the_path_follows_from_the_batch() {
        let path = |max_tokens, top_k, layout| {
            let config = DeviceConfig { top_k, layout, ..config().sized(max_tokens, 64) };
            DeviceShape::new(config).unwrap().path()
        };
        let contiguous = DeviceLayout::Contiguous { pad_to: 1 };
        assert_eq!(path(8, 2, contiguous), TransferPath::Packets);
        assert_eq!(path(8, 2, DeviceLayout::Indexed), TransferPath::Latency);
        assert_eq!(path(9, 2, contiguous), TransferPath::Latency);
        assert_eq!(path(1024, 8, contiguous), TransferPath::Latency);
        assert_eq!(path(1024, 9, contiguous), TransferPath::Bandwidth);
        assert_eq!(path(1025, 1, contiguous), TransferPath::Bandwidth);
        for path in TransferPath::ALL {
            assert_eq!(TransferPath::from_name(path.name()), Some(path));
            let config = DeviceConfig { path: Some(path), ..config() };
            assert_eq!(DeviceShape::new(config).unwrap().path(), path);
        }
    }
}
