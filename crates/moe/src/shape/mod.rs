//! All-to-all shape: all ranks' configuration and the sizes that follow from it.
//!
//! - `config.rs`: the configuration
//! - `agreement.rs`: comparison between the ranks' configurations
//! - `placement.rs`: owner rank for each expert
//! - `expert_map.rs`: expert replicas
//! - `wire.rs`: byte sizes and count limits for headers and metadata records
//! - `sizes.rs`: rows, strides and offsets for each memory area
//! - this file: a checked configuration with the derived sizes

pub(crate) mod agreement;
pub(crate) mod config;
pub(crate) mod expert_map;
pub(crate) mod placement;
pub(crate) mod sizes;
pub(crate) mod wire;

use crate::area::Area;
use crate::elements::dtype::DType;
use crate::error::{Error, fits};
use config::Config;
use placement::Placement;
use sizes::Sizes;
use std::ops::Range;

/// Checked configuration, and the sizes that follow from it.
#[derive(Clone, Debug)]
pub struct Shape {
    config: Config,
    placement: Placement,
    sizes: Sizes,
}

/// Maximum number of channels: more would take all of a group's lanes, and memory before any area is
/// limited.
const MOST_CHANNELS: u64 = 1 << 12;

impl Shape {
    /// Checks `config` and computes all sizes, without allocation.
    ///
    /// # Errors
    /// [`Error::Zero`]; [`Error::RankOutOfRange`]; [`Error::TooLarge`] with the excess.
    pub fn new(mut config: Config) -> Result<Shape, Error> {
        let positive = [
            ("ranks", config.ranks),
            ("experts", config.experts),
            ("top_k", config.top_k),
            ("hidden", config.hidden),
            ("max_tokens", config.max_tokens),
            ("channels", config.channels),
            ("pad_to", config.layout.pad_to()),
            ("block", config.token_type.block().unwrap_or(1)),
        ];
        if let Some(&(field, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(Error::Zero { field });
        }
        if config.rank >= config.ranks {
            return Err(Error::RankOutOfRange { rank: config.rank, ranks: config.ranks });
        }
        let placement = config.placement()?;
        fits("top_k", config.top_k.into(), wire::MOST_SLOTS)?;
        fits("experts", config.experts.into(), wire::MOST_MARKED)?;
        fits("channels", config.channels.into(), MOST_CHANNELS)?;
        fits("experts of one rank", placement.most_local().into(), wire::MOST_LOCAL_EXPERTS)?;
        config.private_rows = config.private_rows.min(config.max_tokens);
        let sizes = Sizes::new(&config, &placement)?;
        Ok(Shape { config, placement, sizes })
    }

    /// The configuration, with `private_rows` limited to `max_tokens`.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Owner rank for each expert.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Rows and bytes in each area.
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Number of experts that this rank owns.
    pub fn local_experts(&self) -> usize {
        self.placement.experts_of(self.config.rank).len()
    }

    /// Maximum number of `rank`'s experts that one token can name.
    pub fn most_local_pairs(&self, rank: u32) -> u32 {
        self.config.top_k.min(self.placement.experts_of(rank).len() as u32)
    }

    /// Size of `hidden` elements in `dtype`, in bytes.
    pub fn row_bytes(&self, dtype: DType) -> usize {
        self.config.hidden as usize * dtype.bytes()
    }

    /// Element bytes in one token.
    pub fn token_bytes(&self) -> usize {
        self.config.hidden as usize * self.config.token_type.bytes()
    }

    /// Scale bytes in one token; 0 if it has none.
    pub fn scale_bytes(&self) -> usize {
        self.config.token_type.scale_bytes(self.config.hidden as usize)
    }

    /// The scales' byte range in a metadata record.
    pub fn scales_in_record(&self) -> Range<usize> {
        let record = self.sizes.extent(Area::Metadata).stride as usize;
        let begin = record - self.scale_bytes().next_multiple_of(wire::RECORD_ALIGNMENT);
        begin..begin + self.scale_bytes()
    }

    /// Area row size in bytes, without alignment padding.
    pub fn area_row_bytes(&self, area: Area) -> usize {
        match area {
            Area::Input | Area::Tokens | Area::Expert => self.token_bytes(),
            Area::ExpertScales => self.scale_bytes(),
            Area::ExpertOutput => self.row_bytes(self.config.combine_dtype),
            Area::SendReplies | Area::Replies => self.row_bytes(self.config.reply_dtype),
            Area::Output => self.row_bytes(self.config.output_dtype),
            Area::SendHeader | Area::SendMetadata | Area::Headers | Area::Metadata => {
                self.sizes.extent(area).stride as usize
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elements::float8::Float8;
    use crate::elements::token_type::{BlockScaled, ScaleType, TokenType};
    use config::Layout;

    #[test]
    fn an_impossible_shape_is_rejected_with_the_field() {
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
    fn an_excess_over_the_limit_is_reported() {
        let config = Config::new(2, 0, 4, 2).sized(16, 64);
        let needed = Shape::new(config.clone()).unwrap().sizes().total_bytes();
        let limited = Config { max_bytes: Some(needed - 10), ..config.clone() };
        let error = Shape::new(limited).unwrap_err();
        assert!(error.to_string().contains(" 10 too many"), "{error}");
        assert!(Shape::new(Config { max_bytes: Some(needed), ..config }).is_ok());
    }

    #[test]
    fn the_largest_numbers_are_rejected_without_overflow() {
        let most = u32::MAX;
        for config in [
            Config::new(most, 0, most, most).sized(most, most),
            Config::new(1, 0, 1, 1).sized(most, most),
            Config { channels: most, ..Config::new(1, 0, 1, 1).sized(1 << 20, most) },
            Config { channels: 4097, ..Config::new(1, 0, 1, 1).sized(1, 1) },
            Config {
                layout: Layout::Contiguous { pad_to: most },
                ..Config::new(4, 0, 400, 8).sized(8, 8)
            },
        ] {
            assert!(matches!(Shape::new(config), Err(Error::TooLarge { .. })));
        }
    }
}
