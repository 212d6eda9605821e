//! What the ranks of one host agree on before their kernels are compiled.

use std::fmt;

use crate::dtype::DType;
use crate::error::Error;
use crate::float8::Float8;
use crate::shape::Weighting;
use crate::token_type::{BlockScaled, TokenType};

/// The shape of an all-to-all between GPUs of one host. Every field but `rank` is the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// The number of ranks, one GPU each.
    pub ranks: u32,
    /// This rank, from 0.
    pub rank: u32,
    /// The number of experts of all ranks together, placed as [`Placement`](crate::Placement) says.
    pub experts: u32,
    /// Expert ids per token.
    pub top_k: u32,
    /// Elements per token.
    pub hidden: u32,
    /// The most tokens that a rank sends in one round.
    pub max_tokens: u32,
    /// Sets of areas; rounds on different channels overlap.
    pub channels: u32,
    /// What tokens are made of as the caller gives them.
    pub token_type: TokenType,
    /// What they are made of on their way: the same, or 8-bit floats (e4m3) to which the device casts them.
    pub wire: TokenType,
    /// The element type of expert outputs.
    pub combine_dtype: DType,
    /// The element type of answers on their way back, to which each is rounded once.
    pub answer_dtype: DType,
    /// The element type of the combined result.
    pub output_dtype: DType,
    /// The type of expert ids.
    pub ids: IdWidth,
    /// How experts find their tokens.
    pub layout: DeviceLayout,
    /// The most positions, (token, local expert) pairs and padding, of a rank in one round. `None` is
    /// the worst case. A round that needs more places nothing at that rank, and poisons the result of all.
    pub max_positions: Option<u32>,
    /// Who multiplies by the router's weights.
    pub weighting: Weighting,
    /// How rows travel; `None` chooses by `max_tokens`.
    pub path: Option<Path>,
    /// The most bytes that the heap of a rank may take.
    pub max_bytes: Option<u64>,
}

/// How experts find their tokens on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceLayout {
    /// Each expert's tokens stand together; a group begins and ends at a multiple of `pad_to` rows.
    /// Padding is not written.
    Contiguous {
        /// Rows that a group is padded to a multiple of, at least 1.
        pad_to: u32,
    },
    /// Tokens stay in the slots in which they arrived; each expert has a list of slots.
    Indexed,
    /// Every expert's group has room for so many tokens, wherever they come from, so that groups begin at
    /// places known before the round.
    Padded {
        /// Tokens that a group has room for; `None` is the worst case, `ranks * max_tokens`.
        expert_capacity: Option<u32>,
    },
}

/// How rows travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// Every word of a row carries the epoch beside it: twice the bytes, no flag to wait for.
    Packets,
    /// A row and then its flag; each sender plans its batch itself.
    Latency,
    /// The same, planned by kernels of their own, for large batches.
    Bandwidth,
}

/// The type of expert ids.
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

impl Path {
    /// All paths.
    pub const ALL: [Path; 3] = [Path::Packets, Path::Latency, Path::Bandwidth];

    /// Its name, as users give it.
    pub fn name(self) -> &'static str {
        match self {
            Path::Packets => "packets",
            Path::Latency => "latency",
            Path::Bandwidth => "bandwidth",
        }
    }

    /// The path of that name.
    pub fn from_name(name: &str) -> Option<Path> {
        Path::ALL.into_iter().find(|path| path.name() == name)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The most ranks: more than the GPUs of any host.
pub(crate) const MOST_RANKS: u64 = 64;
/// The most ids per token: a warp takes one in each lane.
const MOST_TOP_K: u64 = 32;
/// A batch's plan counts them in the shared memory of a block; in a row's metadata they have 16 bits.
const MOST_EXPERTS: u64 = 0x1FFF;
/// What a block keeps for each of a rank's experts is in shared memory.
const MOST_LOCAL: u64 = 1024;
/// The most rows that groups are padded to, so that offsets stay within 32 bits.
const MOST_PAD: u64 = 1 << 16;
/// A token's number among those of its expert has 16 bits there.
const MOST_TOKENS: u64 = 1 << 16;
/// The largest batch that travels as packets unless told otherwise.
const PACKET_TOKENS: u32 = 8;
/// The largest batch, and the most ids, that a sender plans by itself.
const LATENCY_TOKENS: u32 = 1024;
const LATENCY_IDS: u64 = 8192;
/// Rows are moved in pieces of this many bytes.
pub(crate) const PIECE: u64 = 16;
/// Elements of a block that the device can cast.
const CAST_BLOCKS: [u32; 4] = [32, 64, 128, 256];

impl DeviceConfig {
    /// A configuration with the defaults: bfloat16 throughout, contiguous without padding, weights
    /// applied by combine, two channels, room for the worst case.
    pub fn new(ranks: u32, rank: u32, experts: u32, top_k: u32) -> DeviceConfig {
        DeviceConfig {
            ranks,
            rank,
            experts,
            top_k,
            hidden: 8,
            max_tokens: 1,
            channels: 2,
            token_type: DType::BF16.into(),
            wire: DType::BF16.into(),
            combine_dtype: DType::BF16,
            answer_dtype: DType::BF16,
            output_dtype: DType::BF16,
            ids: IdWidth::I64,
            layout: DeviceLayout::Contiguous { pad_to: 1 },
            max_positions: None,
            weighting: Weighting::AtCombine,
            path: None,
            max_bytes: None,
        }
    }

    /// The same configuration with another size of batch and token.
    pub fn sized(self, max_tokens: u32, hidden: u32) -> DeviceConfig {
        DeviceConfig { max_tokens, hidden, ..self }
    }

    /// The same configuration with tokens of another type, which travel as they are.
    pub fn tokens(self, token_type: TokenType) -> DeviceConfig {
        DeviceConfig { token_type, wire: token_type, ..self }
    }

    /// The scales of the tokens on their way, if they have any.
    pub fn scaled(&self) -> Option<BlockScaled> {
        match self.wire {
            TokenType::Plain(_) => None,
            TokenType::Scaled(scaled) => Some(scaled),
        }
    }

    /// Whether the device casts tokens to 8-bit floats.
    pub fn casts(&self) -> bool {
        self.token_type != self.wire
    }

    /// Refuses what no kernel can do.
    pub(super) fn check(&self) -> Result<(), Error> {
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
            ("buffers", self.channels),
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
        let limits = [
            ("ranks", self.ranks, MOST_RANKS, "they are GPUs of one host"),
            ("top_k", self.top_k, MOST_TOP_K, "a warp takes a token's ids, one in each lane"),
            ("experts", self.experts, MOST_EXPERTS, "a block counts them all in its shared memory"),
            ("max_tokens", self.max_tokens, MOST_TOKENS, "tokens of an expert count in 16 bits"),
            ("pad_to", pad_to, MOST_PAD, "offsets count in 32 bits"),
            (
                "experts of a rank",
                self.experts.div_ceil(self.ranks),
                MOST_LOCAL,
                "their counts are kept in the shared memory of a block",
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
                reason: "the padded layout has room by expert: give expert_capacity instead",
            });
        }
        self.check_cast()?;
        self.check_rows()
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

    /// Rows are moved in pieces of 16 bytes.
    fn check_rows(&self) -> Result<(), Error> {
        let rows = [
            ("tokens", self.token_type.bytes()),
            ("tokens on their way", self.wire.bytes()),
            ("expert outputs", self.combine_dtype.bytes()),
            ("answers", self.answer_dtype.bytes()),
            ("the combined result", self.output_dtype.bytes()),
        ];
        // The narrowest type decides, so it is the one to name.
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

    pub(super) fn choose_path(&self) -> Result<Path, Error> {
        let ids = u64::from(self.max_tokens) * u64::from(self.top_k);
        let plans_itself = self.max_tokens <= LATENCY_TOKENS && ids <= LATENCY_IDS;
        // Packets are no rows that an expert could read where they lie.
        let indexed = self.layout == DeviceLayout::Indexed;
        match self.path {
            None if self.max_tokens <= PACKET_TOKENS && !indexed => Ok(Path::Packets),
            None if plans_itself => Ok(Path::Latency),
            None | Some(Path::Bandwidth) => Ok(Path::Bandwidth),
            Some(Path::Packets) if indexed => Err(Error::Unsuitable {
                what: "path packets",
                reason: "the indexed layout reads rows where they land, and packets are no rows: \
                         use latency or bandwidth",
            }),
            Some(Path::Packets | Path::Latency) if !plans_itself => Err(Error::Unsuitable {
                what: "path packets or latency",
                reason: "it takes batches of at most 1024 tokens and 8192 expert ids: use bandwidth",
            }),
            Some(path) => Ok(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceShape;
    use crate::token_type::ScaleType;

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
    fn what_no_kernel_can_do_is_refused_with_the_reason() {
        let padded = DeviceLayout::Padded { expert_capacity: None };
        let none = DeviceLayout::Padded { expert_capacity: Some(0) };
        let most = u32::MAX;
        for (config, words) in [
            (DeviceConfig { top_k: 0, ..config() }, "top_k is 0"),
            (DeviceConfig { channels: 0, ..config() }, "buffers is 0"),
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
                "give expert_capacity",
            ),
            (
                DeviceConfig { wire: wire(Float8::E5M2, 128), ..config() },
                "tokens of bfloat16 cannot travel as float8_e5m2",
            ),
            (DeviceConfig { wire: DType::F16.into(), ..config() }, "cannot travel as float16"),
            (config().tokens(wire(Float8::E4M3, 8)), ""),
            (DeviceConfig { wire: wire(Float8::E4M3, 48), ..config() }, "not 48"),
            (
                config().sized(6, 60),
                "a row of tokens has 120 bytes; on a device rows are multiples of 16 bytes",
            ),
            (
                DeviceConfig { wire: wire(Float8::E4M3, 32), ..config().sized(6, 40) },
                "a row of tokens on their way has 40 bytes",
            ),
            (
                DeviceConfig {
                    path: Some(Path::Packets),
                    layout: DeviceLayout::Indexed,
                    ..config()
                },
                "packets",
            ),
            (
                DeviceConfig { path: Some(Path::Latency), ..config().sized(1025, 64) },
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
    fn the_path_follows_from_the_batch() {
        let path = |max_tokens, top_k, layout| {
            let config = DeviceConfig { top_k, layout, ..config().sized(max_tokens, 64) };
            DeviceShape::new(config).unwrap().path()
        };
        let contiguous = DeviceLayout::Contiguous { pad_to: 1 };
        assert_eq!(path(8, 2, contiguous), Path::Packets);
        assert_eq!(path(8, 2, DeviceLayout::Indexed), Path::Latency);
        assert_eq!(path(9, 2, contiguous), Path::Latency);
        assert_eq!(path(1024, 8, contiguous), Path::Latency);
        assert_eq!(path(1024, 9, contiguous), Path::Bandwidth);
        assert_eq!(path(1025, 1, contiguous), Path::Bandwidth);
        for path in Path::ALL {
            assert_eq!(Path::from_name(path.name()), Some(path));
            let config = DeviceConfig { path: Some(path), ..config() };
            assert_eq!(DeviceShape::new(config).unwrap().path(), path);
        }
    }
}
