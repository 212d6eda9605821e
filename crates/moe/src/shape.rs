//! What the ranks agree on before they exchange a token.

use crate::dtype::DType;
use crate::error::Error;
use crate::metadata;
use crate::placement::Placement;
use crate::plan;
use crate::rows::Area;
use crate::sizes::Sizes;
use crate::token_type::TokenType;
use std::ops::Range;

/// The shape of an all-to-all. Every field but `rank` is the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The number of ranks.
    pub ranks: u32,
    /// This rank, from 0.
    pub rank: u32,
    /// The number of experts of all ranks together, placed as [`Placement`] says.
    pub experts: u32,
    /// Expert ids per token.
    pub top_k: u32,
    /// Elements per token.
    pub hidden: u32,
    /// The most tokens that a rank sends in one round.
    pub max_tokens: u32,
    /// Rows that travel with the header into each source's private area, before all counts are
    /// known; more than `max_tokens` is taken as `max_tokens`.
    pub private_rows: u32,
    /// The most rows (token copies) that a rank receives in one round from all sources together.
    /// `None` is the worst case, `ranks * max_tokens`; less saves memory, and a round that needs
    /// more fails on every rank with [`Error::Capacity`].
    pub max_receive_rows: Option<u32>,
    /// Sets of areas; with two, a round may begin while the last one's arrays are still held.
    pub buffers: u32,
    /// What tokens are made of; they are sent as they are given.
    pub token_type: TokenType,
    /// The element type of expert outputs.
    pub combine_dtype: DType,
    /// The element type of answers on their way back, to which each is rounded once.
    pub answer_dtype: DType,
    /// The element type of the combined result.
    pub output_dtype: DType,
    /// How experts find their tokens.
    pub layout: Layout,
    /// What an expert's rank sends back.
    pub combine: CombineMode,
    /// Where the router's weights are applied.
    pub weighting: Weighting,
    /// The most bytes that the areas may take, for those who want a limit of their own.
    pub max_bytes: Option<u64>,
}

/// How experts find their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Tokens are copied so that each expert's stand together, ordered by source rank and then by
    /// token. A group begins and ends at a multiple of `pad_to` rows; padding is zeros.
    Contiguous {
        /// Rows that a group is padded to a multiple of, at least 1.
        pad_to: u32,
    },
    /// Tokens stay in the slots in which they arrived; each expert has a list of slots, in the same
    /// order.
    Indexed,
}

impl Layout {
    /// The multiple to which groups are padded.
    pub fn pad_to(self) -> u32 {
        match self {
            Layout::Contiguous { pad_to } => pad_to,
            Layout::Indexed => 1,
        }
    }
}

/// What an expert's rank sends back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CombineMode {
    /// One row per received token: the weighted sum over this rank's experts, in float32 and top-k
    /// order, rounded once. The least traffic.
    ReduceAtExpert,
    /// One row per token and expert, not weighted. The source adds them up in float32 and top-k order,
    /// which gives the same bits as one process would.
    PerExpert,
}

/// Who multiplies by the router's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Weighting {
    /// Combine does.
    #[default]
    AtCombine,
    /// The experts did: combine only adds.
    AtExpert,
}

impl Config {
    /// Private rows unless told otherwise: enough for a decode step.
    pub const PRIVATE_ROWS: u32 = 32;

    /// A configuration with the defaults: float32, contiguous without padding, reduced at the experts,
    /// two buffers, room for the worst case.
    pub fn new(ranks: u32, rank: u32, experts: u32, top_k: u32) -> Config {
        Config {
            ranks,
            rank,
            experts,
            top_k,
            hidden: 1,
            max_tokens: 1,
            private_rows: Config::PRIVATE_ROWS,
            max_receive_rows: None,
            buffers: 2,
            token_type: TokenType::Plain(DType::F32),
            combine_dtype: DType::F32,
            answer_dtype: DType::F32,
            output_dtype: DType::F32,
            layout: Layout::Contiguous { pad_to: 1 },
            combine: CombineMode::ReduceAtExpert,
            weighting: Weighting::default(),
            max_bytes: None,
        }
    }

    /// The same configuration with another size of batch and token.
    pub fn sized(self, max_tokens: u32, hidden: u32) -> Config {
        Config { max_tokens, hidden, ..self }
    }

    /// The same configuration with one element type for everything.
    pub fn dtype(self, dtype: DType) -> Config {
        Config {
            token_type: dtype.into(),
            combine_dtype: dtype,
            answer_dtype: dtype,
            output_dtype: dtype,
            ..self
        }
    }
}

/// A configuration that was found to be possible, and what follows from it.
#[derive(Clone, Debug)]
pub struct Shape {
    config: Config,
    placement: Placement,
    sizes: Sizes,
}

impl Shape {
    /// Checks `config` and computes every size; allocates nothing.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::RankOutOfRange`], or [`Error::TooLarge`], which says by how much.
    pub fn new(mut config: Config) -> Result<Shape, Error> {
        let positive = [
            ("ranks", config.ranks),
            ("experts", config.experts),
            ("top_k", config.top_k),
            ("hidden", config.hidden),
            ("max_tokens", config.max_tokens),
            ("buffers", config.buffers),
            ("pad_to", config.layout.pad_to()),
            ("block", config.token_type.block().unwrap_or(1)),
        ];
        if let Some(&(field, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(Error::Zero { field });
        }
        if config.rank >= config.ranks {
            return Err(Error::RankOutOfRange { rank: config.rank, ranks: config.ranks });
        }
        let placement = Placement::new(config.ranks, config.experts);
        fits("top_k", config.top_k.into(), metadata::MOST_SLOTS)?;
        fits("experts", config.experts.into(), plan::MOST_MARKED)?;
        fits("experts of one rank", placement.most_local().into(), metadata::MOST_LOCAL_EXPERTS)?;
        config.private_rows = config.private_rows.min(config.max_tokens);
        let sizes = Sizes::new(&config, &placement)?;
        Ok(Shape { config, placement, sizes })
    }

    /// What was asked for, with `private_rows` brought down to `max_tokens`.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Which rank owns which expert.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// What it takes in memory.
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// The number of experts that this rank owns.
    pub fn local_experts(&self) -> usize {
        self.placement.experts_of(self.config.rank).len()
    }

    /// The most experts of `rank` that one token can name.
    pub fn most_local_pairs(&self, rank: u32) -> u32 {
        self.config.top_k.min(self.placement.experts_of(rank).len() as u32)
    }

    /// Bytes of a row of `hidden` elements in `dtype`.
    pub fn row_bytes(&self, dtype: DType) -> usize {
        self.config.hidden as usize * dtype.bytes()
    }

    /// Bytes of one token's elements.
    pub fn token_bytes(&self) -> usize {
        self.config.hidden as usize * self.config.token_type.bytes()
    }

    /// Bytes of one token's scales; 0 if it has none.
    pub fn scale_bytes(&self) -> usize {
        self.config.token_type.scale_bytes(self.config.hidden as usize)
    }

    /// Where the scales stand in a metadata record.
    pub fn scales_in_record(&self) -> Range<usize> {
        let record = self.sizes.extent(Area::Metadata).stride as usize;
        let begin = record - self.scale_bytes().next_multiple_of(metadata::ALIGNMENT);
        begin..begin + self.scale_bytes()
    }

    /// Bytes of a row of an area, without what aligns the next one.
    pub fn area_row_bytes(&self, area: Area) -> usize {
        match area {
            Area::Input | Area::Tokens | Area::Expert => self.token_bytes(),
            Area::ExpertScales => self.scale_bytes(),
            Area::ExpertOutput => self.row_bytes(self.config.combine_dtype),
            Area::Replies | Area::Answers => self.row_bytes(self.config.answer_dtype),
            Area::Output => self.row_bytes(self.config.output_dtype),
            Area::SendHeader | Area::SendMetadata | Area::Headers | Area::Metadata => {
                self.sizes.extent(area).stride as usize
            }
        }
    }
}

/// Refuses more of `what` than `limit`.
pub(crate) fn fits(what: &'static str, needed: u128, limit: u64) -> Result<(), Error> {
    if needed > u128::from(limit) {
        return Err(Error::TooLarge { what, needed, limit });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::float8::Float8;
    use crate::token_type::{BlockScaled, ScaleType};

    #[test]
    fn an_impossible_shape_says_what_is_wrong() {
        let config = Config::new(4, 4, 8, 2);
        let error = Shape::new(config.clone()).unwrap_err();
        assert!(matches!(error, Error::RankOutOfRange { rank: 4, ranks: 4 }));
        let config = Config { rank: 3, top_k: 0, ..config };
        let error = Shape::new(config.clone()).unwrap_err();
        assert!(matches!(error, Error::Zero { field: "top_k" }));
        let config = Config { top_k: 2, layout: Layout::Contiguous { pad_to: 0 }, ..config };
        assert!(matches!(Shape::new(config.clone()).unwrap_err(), Error::Zero { field: "pad_to" }));
        let scaled = BlockScaled { format: Float8::E5M2, scale: ScaleType::F32, block: 0 };
        let (token_type, layout) = (TokenType::Scaled(scaled), Layout::Indexed);
        let config = Config { token_type, layout, ..config };
        assert!(matches!(Shape::new(config).unwrap_err(), Error::Zero { field: "block" }));
    }

    #[test]
    fn what_cannot_fit_says_by_how_much() {
        let config = Config::new(2, 0, 4, 2).sized(16, 64);
        let needed = Shape::new(config.clone()).unwrap().sizes().total_bytes();
        let limited = Config { max_bytes: Some(needed - 10), ..config.clone() };
        let error = Shape::new(limited).unwrap_err();
        assert!(error.to_string().contains(" 10 too many"), "{error}");
        assert!(Shape::new(Config { max_bytes: Some(needed), ..config }).is_ok());
    }

    #[test]
    fn the_largest_numbers_are_refused_without_overflow() {
        let most = u32::MAX;
        for config in [
            Config::new(most, 0, most, most).sized(most, most),
            Config::new(1, 0, 1, 1).sized(most, most),
            Config { buffers: most, ..Config::new(1, 0, 1, 1).sized(1 << 20, most) },
            Config {
                layout: Layout::Contiguous { pad_to: most },
                ..Config::new(4, 0, 400, 8).sized(8, 8)
            },
        ] {
            assert!(matches!(Shape::new(config), Err(Error::TooLarge { .. })));
        }
    }
}
