//! All-to-all configuration: the fields that every rank passes.

use crate::elements::dtype::DType;
use crate::elements::token_type::TokenType;
use crate::error::Error;
use crate::shape::placement::Placement;

/// All-to-all configuration. All fields but `rank` are equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// World size.
    pub ranks: u32,
    /// This rank, from 0.
    pub rank: u32,
    /// Expert count on all ranks together.
    pub experts: u32,
    /// Owner rank for each expert; `None` for [`Placement::new`].
    pub placement: Option<Placement>,
    /// Expert ids per token.
    pub top_k: u32,
    /// Elements per token.
    pub hidden: u32,
    /// Maximum number of tokens that a rank sends in one round.
    pub max_tokens: u32,
    /// Rows that are sent behind the header to each source's private area, before all counts are known.
    /// Values above `max_tokens` are limited to `max_tokens`.
    pub private_rows: u32,
    /// Maximum number of rows (token copies) that a rank receives in one round from all sources together.
    /// `None` is the worst case, `ranks * max_tokens`, for example 64 * 128 = 8192. A smaller value saves
    /// memory, and a round that needs more fails on every rank with [`Error::Capacity`].
    pub max_receive_rows: Option<u32>,
    /// Channels, each for one round in flight. With two, a round may begin while the previous one's arrays
    /// are held.
    pub channels: u32,
    /// Token element type; tokens are sent unchanged.
    pub token_type: TokenType,
    /// Expert output element type.
    pub combine_dtype: DType,
    /// Reply element type, to which each reply is rounded once.
    pub reply_dtype: DType,
    /// Combined result element type.
    pub output_dtype: DType,
    /// Received token layout.
    pub layout: Layout,
    /// Reply content.
    pub combine: CombineMode,
    /// Rule for applying the router's weights.
    pub weighting: Weighting,
    /// Maximum size of all areas in bytes, if limited.
    pub max_bytes: Option<u64>,
}

/// Received token layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Tokens are copied into a group for each expert, ordered by source rank and then by token. A group
    /// begins and ends at a multiple of `pad_to` rows; padding is zeros.
    Contiguous {
        /// Group sizes are rounded up to a multiple of this many rows, at least 1. With 8, for example, 46
        /// tokens make a group with 48 rows.
        pad_to: u32,
    },
    /// Tokens stay in the slots in which they arrived; each expert has a list of slots, in the same order.
    Indexed,
}

impl Layout {
    /// Multiple to which groups are padded.
    pub fn pad_to(self) -> u32 {
        match self {
            Layout::Contiguous { pad_to } => pad_to,
            Layout::Indexed => 1,
        }
    }
}

/// Reply content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CombineMode {
    /// One row per received token: the weighted sum over this rank's experts, in float32 and top-k order,
    /// rounded once. Least traffic.
    ReduceAtExpert,
    /// One row per token and expert, unweighted. The source sums them in float32 and top-k order, with the
    /// same bits as a single process.
    PerExpert,
}

/// Rule for applying the router's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Weighting {
    /// Combine multiplies by the weights.
    #[default]
    AtCombine,
    /// The experts have applied the weights; combine only adds.
    AtExpert,
}

impl Config {
    /// Default private row count: enough for a decode step.
    pub const PRIVATE_ROWS: u32 = 32;

    /// A configuration with the defaults: float32, contiguous layout without padding, reduction at the
    /// experts, two channels, worst-case capacity.
    pub fn new(ranks: u32, rank: u32, experts: u32, top_k: u32) -> Config {
        Config {
            ranks,
            rank,
            experts,
            placement: None,
            top_k,
            hidden: 1,
            max_tokens: 1,
            private_rows: Config::PRIVATE_ROWS,
            max_receive_rows: None,
            channels: 2,
            token_type: TokenType::Plain(DType::F32),
            combine_dtype: DType::F32,
            reply_dtype: DType::F32,
            output_dtype: DType::F32,
            layout: Layout::Contiguous { pad_to: 1 },
            combine: CombineMode::ReduceAtExpert,
            weighting: Weighting::default(),
            max_bytes: None,
        }
    }

    /// The placement, if ranks and experts match the configuration.
    pub(super) fn placement(&self) -> Result<Placement, Error> {
        let placement = self.placement.clone();
        let placement = placement.unwrap_or_else(|| Placement::new(self.ranks, self.experts));
        let given = [
            ("ranks", placement.ranks(), self.ranks),
            ("experts", placement.experts(), self.experts),
        ];
        match given.into_iter().find(|(_, given, needed)| given != needed) {
            None => Ok(placement),
            Some((what, given, expected)) => {
                let (given, expected) = (given as usize, expected as usize);
                Err(Error::WrongLength { what, given, expected })
            }
        }
    }

    /// The configuration with another batch and token size.
    pub fn sized(self, max_tokens: u32, hidden: u32) -> Config {
        Config { max_tokens, hidden, ..self }
    }

    /// The configuration with one element type throughout.
    pub fn dtype(self, dtype: DType) -> Config {
        Config {
            token_type: dtype.into(),
            combine_dtype: dtype,
            reply_dtype: dtype,
            output_dtype: dtype,
            ..self
        }
    }
}
