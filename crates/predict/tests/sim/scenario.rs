//! Random scenarios for the MoE suite's program.

use weft_fabric::Rank;
use weft_fabric::random::SplitMix64;
use weft_moe::routing::Routing;
use weft_moe::{CombineMode, Config, DType, Layout, Shape, Weighting};
use weft_scenarios::pick;

use crate::common::{Batch, batches, token_types};

/// One round on all ranks.
pub struct Round {
    pub batches: Vec<Batch>,
    pub combined: bool,
    pub weighting: Weighting,
}

pub struct Scenario {
    pub seed: u64,
    pub config: Config,
    pub rounds: Vec<Round>,
    pub laziness: f64,
}

impl Scenario {
    pub fn random(seed: u64) -> Scenario {
        let mut random = SplitMix64::new(seed);
        let ranks = 1 + random.below(6) as u32;
        let max_tokens = 1 + random.below(9) as u32;
        let types = token_types(4);
        let config = Config {
            private_rows: random.below(u64::from(max_tokens) + 1) as u32,
            channels: 1 + random.below(3) as u32,
            token_type: pick(&mut random, &types),
            combine_dtype: pick(&mut random, &DType::ALL),
            reply_dtype: pick(&mut random, &DType::ALL),
            output_dtype: pick(&mut random, &DType::ALL),
            layout: pick(&mut random, &[Layout::Indexed, Layout::Contiguous { pad_to: 2 }]),
            combine: pick(&mut random, &[CombineMode::ReduceAtExpert, CombineMode::PerExpert]),
            ..Config::new(ranks, 0, 1 + random.below(13) as u32, 1 + random.below(5) as u32)
                .sized(max_tokens, 1 + random.below(19) as u32)
        };
        let routings = [
            Some(Routing::Uniform),
            Some(Routing::Zipf { exponent: 1.2 }),
            Some(Routing::Incast),
            None,
        ];
        let rounds = (0..1 + random.below(5))
            .map(|_| Round {
                batches: batches(&config, pick(&mut random, &routings), 1, random.bits()),
                combined: !random.chance(0.1),
                weighting: pick(&mut random, &[Weighting::AtCombine, Weighting::AtExpert]),
            })
            .collect();
        let laziness = pick(&mut random, &[0.0, 0.2, 0.6]);
        Scenario { seed, config, rounds, laziness }
    }
}

/// The shape as `rank` sees it.
pub fn shape(config: &Config, rank: Rank) -> Shape {
    Shape::new(Config { rank: rank.0, ..config.clone() }).expect("a shape of the tests is possible")
}
