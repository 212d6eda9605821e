//! Dispatch and combine job: sizes, expert choice, costs.

use serde::{Deserialize, Serialize};
use weft_moe::routing::Routing;
use weft_moe::{BlockScaled, CombineMode, Config, DType, Float8, ScaleType, Shape, TokenType};
use weft_netsim::Link;

use crate::check::{at_least_0, from_1_to, more_than_0};
use crate::cluster::Cluster;
use crate::error::Error;

/// Maximum rank count: bounded by the tags and by memory for pairs.
const MOST_RANKS: u32 = 1024;
const MOST_ROUNDS: u32 = 64;
/// Maximum token-expert pairs per rank: planning them takes about a second, between two checks for cancellation.
const MOST_PAIRS: u64 = 1 << 24;

/// Dispatch and combine rounds on a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeScenario {
    /// Network with its conditions.
    pub cluster: Cluster,
    /// Workload.
    pub job: MoeJob,
    /// Number of reported links, busiest first.
    #[serde(default = "crate::outcome::default_links")]
    pub links: usize,
    /// Maximum spans in the trace; 0 for no trace.
    #[serde(default)]
    pub trace: usize,
}

/// Dispatch and combine rounds, without a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeJob {
    /// Rank count; consecutive ranks form an NVLink domain.
    pub ranks: u32,
    /// NICs per rank; a write is striped over them.
    #[serde(default = "one")]
    pub nics_per_rank: u32,
    /// Ranks per NIC.
    #[serde(default = "one")]
    pub ranks_per_nic: u32,
    /// NVLink domains; absent: all rows use the NICs.
    #[serde(default)]
    pub nvlink: Option<Nvlink>,
    /// Expert count.
    #[serde(default = "experts")]
    pub experts: u32,
    /// Experts per token.
    #[serde(default = "top_k")]
    pub top_k: u32,
    /// Tokens per rank and round.
    #[serde(default = "tokens")]
    pub tokens: u32,
    /// Hidden size, in elements.
    #[serde(default = "hidden")]
    pub hidden: u32,
    /// Token dtype in dispatch: `float8_e4m3fn` (with a float32 scale for each 128 elements), `bfloat16`,
    /// `float16` or `float32`.
    #[serde(default = "token_dtype")]
    pub token_dtype: String,
    /// Reply dtype.
    #[serde(default = "answer_dtype")]
    pub answer_dtype: String,
    /// Rows per peer sent before the counts are known.
    #[serde(default = "private_rows")]
    pub private_rows: u32,
    /// Token copies.
    #[serde(default)]
    pub copies: Copies,
    /// Which experts tokens choose.
    #[serde(default)]
    pub token_routing: TokenRouting,
    /// Consecutive rounds.
    #[serde(default = "rounds")]
    pub rounds: u32,
    /// Barrier between rounds: all ranks begin a round when the last rank has ended the previous one.
    #[serde(default)]
    pub barrier: bool,
    /// Round costs beside messages.
    #[serde(default)]
    pub costs: MoeCosts,
}

/// NVLink domains.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nvlink {
    /// Ranks per domain.
    pub ranks: u32,
    /// Dispatch bandwidth of a GPU in each direction, in bytes per second.
    pub bytes_per_s: f64,
    /// Combine bandwidth; default: the same as dispatch.
    #[serde(default)]
    pub combine_bytes_per_s: Option<f64>,
    /// Store latency.
    #[serde(default)]
    pub latency_s: f64,
}

/// Token copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Copies {
    /// One for each rank that has a chosen expert, with metadata; one reply from each.
    #[default]
    Rank,
    /// One for each expert; one reply from each.
    Expert,
}

/// Which experts tokens choose.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum TokenRouting {
    /// Uniform distribution.
    #[default]
    Uniform,
    /// Zipf distribution: the i-th most popular in proportion to `i^-exponent`.
    Zipf {
        /// Exponent.
        exponent: f64,
    },
    /// All tokens go to rank 0's experts.
    Incast,
    /// Routing trace.
    Trace {
        /// Expert ids for each layer, `top_k` for each token; negative ids are dropped. Rounds take the layers in turn,
        /// ranks a layer's tokens, both cyclically.
        layers: Vec<Vec<i64>>,
    },
}

/// Round costs at each rank beside messages, in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MoeCosts {
    /// From the dispatch call until the header is posted: launch and counting.
    pub dispatch_start_s: f64,
    /// Rate at which rows for NICs are copied to the send buffer; absent: rows are sent in place.
    pub staging_bytes_per_s: Option<f64>,
    /// Time to post each dispatch row for a NIC, beside `post_s` for its write; replies are contiguous and have none.
    pub post_row_s: f64,
    /// From the last header until the remainder is posted: computing offsets.
    pub route_s: f64,
    /// From the last row to the end of dispatch.
    pub dispatch_end_s: f64,
    /// Time in the experts; part of neither phase.
    pub experts_s: f64,
    /// From the combine call until the replies are posted.
    pub combine_start_s: f64,
    /// From the last reply to the end of combine.
    pub combine_end_s: f64,
}

impl MoeJob {
    /// Rejects invalid values.
    pub fn check(&self) -> Result<(), Error> {
        let counts = [
            ("ranks", self.ranks, MOST_RANKS),
            ("nics_per_rank", self.nics_per_rank, 16),
            ("ranks_per_nic", self.ranks_per_nic, MOST_RANKS),
            ("rounds", self.rounds, MOST_ROUNDS),
        ];
        for (field, value, most) in counts {
            from_1_to(most.into(), field, value)?;
        }
        let pairs = u64::from(self.tokens) * u64::from(self.top_k);
        if pairs > MOST_PAIRS {
            let must = format!("at most {MOST_PAIRS} for each rank");
            return Err(Error::field("tokens times top_k", pairs, must));
        }
        if self.nics_per_rank > 1 && self.ranks_per_nic > 1 {
            let must = "1 where ranks share a NIC";
            return Err(Error::field("nics_per_rank", self.nics_per_rank, must));
        }
        let costs = &self.costs;
        let mut times = vec![
            ("costs.dispatch_start_s", costs.dispatch_start_s),
            ("costs.post_row_s", costs.post_row_s),
            ("costs.route_s", costs.route_s),
            ("costs.dispatch_end_s", costs.dispatch_end_s),
            ("costs.experts_s", costs.experts_s),
            ("costs.combine_start_s", costs.combine_start_s),
            ("costs.combine_end_s", costs.combine_end_s),
        ];
        if let Some(rate) = costs.staging_bytes_per_s {
            more_than_0("costs.staging_bytes_per_s", rate)?;
        }
        if let Some(nvlink) = &self.nvlink {
            times.push(("nvlink.latency_s", nvlink.latency_s));
            if nvlink.ranks == 0 {
                return Err(Error::field("nvlink.ranks", 0, "at least 1"));
            }
            for rate in [Some(nvlink.bytes_per_s), nvlink.combine_bytes_per_s].into_iter().flatten()
            {
                more_than_0("nvlink.bytes_per_s", rate)?;
            }
        }
        for (field, value) in times {
            at_least_0(field, value)?;
        }
        match &self.token_routing {
            TokenRouting::Zipf { exponent } => at_least_0("token_routing.exponent", *exponent),
            TokenRouting::Trace { layers } => {
                let top_k = self.top_k.max(1) as usize;
                let empty =
                    |layer: &Vec<i64>| layer.is_empty() || !layer.len().is_multiple_of(top_k);
                if layers.is_empty() || layers.iter().any(empty) {
                    let must = "top_k ids for each of at least one token in each of its layers";
                    return Err(Error::field("token_routing.layers", "incomplete", must));
                }
                Ok(())
            }
            _ => Ok(()),
        }?;
        self.shape(0).map(drop)
    }

    /// NIC count over all ranks.
    pub fn nics(&self) -> u32 {
        self.place(self.ranks - 1, self.nics_per_rank - 1) as u32 + 1
    }

    /// All-to-all shape at `rank`.
    pub fn shape(&self, rank: u32) -> Result<Shape, Error> {
        let plain = |field: &str, name: &str| {
            let must = "float8_e4m3fn, bfloat16, float16 or float32";
            DType::from_name(name).ok_or_else(|| Error::field(field, name, must))
        };
        let token_type = match self.token_dtype.as_str() {
            "float8_e4m3fn" => TokenType::Scaled(BlockScaled {
                format: Float8::E4M3,
                scale: ScaleType::F32,
                block: 128,
            }),
            name => plain("token_dtype", name)?.into(),
        };
        let config = Config {
            token_type,
            reply_dtype: plain("answer_dtype", &self.answer_dtype)?,
            private_rows: self.private_rows,
            combine: match self.copies {
                Copies::Rank => CombineMode::ReduceAtExpert,
                Copies::Expert => CombineMode::PerExpert,
            },
            ..Config::new(self.ranks, rank, self.experts, self.top_k)
                .sized(self.tokens, self.hidden)
        };
        Ok(Shape::new(config)?)
    }

    /// Expert ids in one rank's batch.
    pub(super) fn ids(&self, seed: u64, rank: u32, round: u32) -> Vec<i64> {
        let (tokens, top_k) = (self.tokens as usize, self.top_k as usize);
        // Equal popularity in all rounds, different tokens in each.
        let drawn = |routing: Routing| {
            let stream = rank + round * self.ranks;
            routing.ids(seed, stream, tokens, top_k, self.experts)
        };
        match &self.token_routing {
            TokenRouting::Uniform => drawn(Routing::Uniform),
            TokenRouting::Zipf { exponent } => drawn(Routing::Zipf { exponent: *exponent }),
            TokenRouting::Incast => drawn(Routing::Incast),
            TokenRouting::Trace { layers } => {
                let layer = &layers[round as usize % layers.len()];
                let turn = round as usize / layers.len();
                let first = (turn * self.ranks as usize + rank as usize) * tokens;
                let rows = layer.len() / top_k;
                (first..first + tokens)
                    .flat_map(|row| layer[row % rows * top_k..][..top_k].iter().copied())
                    .collect()
            }
        }
    }

    /// Place of a rank's NIC among the endpoints in rank order; see [`World::places`].
    ///
    /// [`World::places`]: crate::world::World::places
    pub(super) fn place(&self, rank: u32, nic: u32) -> usize {
        let place = match self.ranks_per_nic > 1 {
            true => rank / self.ranks_per_nic,
            false => rank * self.nics_per_rank + nic,
        };
        place as usize
    }

    /// True for two ranks in one NVLink domain.
    pub(super) fn same_domain(&self, a: u32, b: u32) -> bool {
        self.nvlink.as_ref().is_some_and(|nvlink| a / nvlink.ranks == b / nvlink.ranks)
    }

    /// NVLink domain links: one out and one in for each rank, for dispatch and then for combine.
    pub fn private_links(&self) -> Vec<Link> {
        let Some(nvlink) = &self.nvlink else { return Vec::new() };
        let combine = nvlink.combine_bytes_per_s.unwrap_or(nvlink.bytes_per_s);
        let link = |bandwidth| Link { bandwidth, latency: 0.0 };
        let of_a_rank = [nvlink.bytes_per_s, nvlink.bytes_per_s, combine, combine].map(link);
        of_a_rank.repeat(self.ranks as usize)
    }
}

fn one() -> u32 {
    1
}

fn experts() -> u32 {
    256
}

fn top_k() -> u32 {
    8
}

fn tokens() -> u32 {
    128
}

fn hidden() -> u32 {
    7168
}

fn token_dtype() -> String {
    "float8_e4m3fn".into()
}

fn answer_dtype() -> String {
    "bfloat16".into()
}

fn private_rows() -> u32 {
    Config::PRIVATE_ROWS
}

fn rounds() -> u32 {
    4
}
