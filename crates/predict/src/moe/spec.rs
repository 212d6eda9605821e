//! What is asked, and what it costs.

use serde::{Deserialize, Serialize};
use weft_moe::routing::Routing;
use weft_moe::{BlockScaled, CombineMode, Config, DType, Float8, ScaleType, Shape, TokenType};
use weft_netsim::Link;
use weft_topology::{EndpointId, Network};

use crate::check::{at_least_0, from_1_to, more_than_0};
use crate::error::Error;
use crate::spec::Cluster;

/// More ranks than this have more pairs than fit into tags and memory.
const MOST_RANKS: u32 = 1024;
const MOST_ROUNDS: u32 = 64;

/// Rounds of dispatch and combine on a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeSpec {
    /// On what.
    pub cluster: Cluster,
    /// What runs.
    pub job: MoeJob,
    /// How many links to report, the busiest first.
    #[serde(default = "crate::spec::links")]
    pub links: usize,
    /// Record up to so many spans for a trace.
    #[serde(default)]
    pub trace: usize,
}

/// Rounds of dispatch and combine, wherever they run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeJob {
    /// Ranks, in blocks of an NVLink domain each.
    pub ranks: u32,
    /// NICs of each rank; a write is cut into as many parts, one for each.
    #[serde(default = "one")]
    pub nics_per_rank: u32,
    /// Ranks that share a NIC.
    #[serde(default = "one")]
    pub ranks_per_nic: u32,
    /// What ranks of one host reach each other by; without it everything takes the NICs.
    #[serde(default)]
    pub nvlink: Option<Nvlink>,
    /// Experts of all ranks together.
    #[serde(default = "experts")]
    pub experts: u32,
    /// Experts that a token names.
    #[serde(default = "top_k")]
    pub top_k: u32,
    /// Tokens of each rank in each round.
    #[serde(default = "tokens")]
    pub tokens: u32,
    /// Elements of a token.
    #[serde(default = "hidden")]
    pub hidden: u32,
    /// Of tokens on their way out: `float8_e4m3fn` (with a float32 scale for each 128 elements), `bfloat16`,
    /// `float16` or `float32`.
    #[serde(default = "token_dtype")]
    pub token_dtype: String,
    /// Of answers on their way back.
    #[serde(default = "answer_dtype")]
    pub answer_dtype: String,
    /// Rows that travel with the header.
    #[serde(default = "private_rows")]
    pub private_rows: u32,
    /// For what a token is copied.
    #[serde(default)]
    pub copies: Copies,
    /// Which experts tokens name.
    #[serde(default)]
    pub token_routing: RoutingSpec,
    /// Rounds that are measured, one after the other.
    #[serde(default = "rounds")]
    pub rounds: u32,
    /// Whether all ranks begin each round together, the moment that the last has ended the one before.
    #[serde(default)]
    pub barrier: bool,
    /// What a round costs beside its messages.
    #[serde(default)]
    pub costs: MoeCosts,
}

/// A domain in which every GPU reaches every other at full speed.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nvlink {
    /// Ranks of a domain.
    pub ranks: u32,
    /// What a GPU sends and what it receives, in bytes a second each, in dispatch.
    pub bytes_per_s: f64,
    /// The same in combine, if it differs.
    #[serde(default)]
    pub combine_bytes_per_s: Option<f64>,
    /// From a store until the peer sees it.
    #[serde(default)]
    pub latency_s: f64,
}

/// For what a token is copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Copies {
    /// Once for each rank that owns any of its experts, with its metadata; one answer comes back from each.
    #[default]
    Rank,
    /// Once for each expert; one answer for each.
    Expert,
}

/// Which experts tokens name.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum RoutingSpec {
    /// Any, alike.
    #[default]
    Uniform,
    /// The i-th most popular in proportion to `i^-exponent`.
    Zipf {
        /// 1 is the classic law.
        exponent: f64,
    },
    /// All tokens the same.
    Incast,
    /// What a trace says.
    Trace {
        /// For each layer the ids of its tokens, `top_k` of each; a negative one names nobody. Rounds take
        /// layers in turn, ranks the tokens of a layer, beginning again at the end.
        layers: Vec<Vec<i64>>,
    },
}

/// What a round costs each rank beside its messages, in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MoeCosts {
    /// From the call of dispatch until the header can be posted: launch and counting.
    pub dispatch_start_s: f64,
    /// Bytes of rows for NICs that a rank copies to its send buffer in a second, before they leave; none
    /// where they leave from where they lie.
    pub staging_bytes_per_s: Option<f64>,
    /// From the last header until the remainder can be posted: computing offsets.
    pub route_s: f64,
    /// From the last row until the experts may begin.
    pub dispatch_end_s: f64,
    /// What the experts take; it is not part of either time.
    pub experts_s: f64,
    /// From the call of combine until answers can be posted.
    pub combine_start_s: f64,
    /// From the last answer until the sums are there.
    pub combine_end_s: f64,
}

impl MoeJob {
    /// Refuses what cannot be.
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
        if self.nics_per_rank > 1 && self.ranks_per_nic > 1 {
            let must = "1 where ranks share a NIC";
            return Err(Error::field("nics_per_rank", self.nics_per_rank, must));
        }
        let costs = &self.costs;
        let mut times = vec![
            ("costs.dispatch_start_s", costs.dispatch_start_s),
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
            RoutingSpec::Zipf { exponent } => at_least_0("token_routing.exponent", *exponent),
            RoutingSpec::Trace { layers } => {
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

    /// Refuses a network with too few endpoints.
    pub fn fits(&self, network: &Network) -> Result<(), Error> {
        let last = self.endpoint(self.ranks - 1, self.nics_per_rank - 1).0;
        if last >= network.endpoints() {
            let must = format!("at least {} for {} ranks", last + 1, self.ranks);
            return Err(Error::field("the network's endpoints", network.endpoints(), must));
        }
        Ok(())
    }

    /// What `weft-moe` makes of it, as `rank` sees it.
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
            answer_dtype: plain("answer_dtype", &self.answer_dtype)?,
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

    /// The ids of one rank's batch.
    pub(super) fn ids(&self, seed: u64, rank: u32, round: u32) -> Vec<i64> {
        let (tokens, top_k) = (self.tokens as usize, self.top_k as usize);
        // The same popularity in all rounds, and other tokens in each.
        let drawn = |routing: Routing| {
            let stream = rank + round * self.ranks;
            routing.ids(seed, stream, tokens, top_k, self.experts)
        };
        match &self.token_routing {
            RoutingSpec::Uniform => drawn(Routing::Uniform),
            RoutingSpec::Zipf { exponent } => drawn(Routing::Zipf { exponent: *exponent }),
            RoutingSpec::Incast => drawn(Routing::Incast),
            RoutingSpec::Trace { layers } => {
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

    /// A rank's NIC.
    pub(super) fn endpoint(&self, rank: u32, nic: u32) -> EndpointId {
        if self.ranks_per_nic > 1 {
            return EndpointId(rank / self.ranks_per_nic);
        }
        EndpointId(rank * self.nics_per_rank + nic)
    }

    /// Whether two ranks reach each other without a NIC.
    pub(super) fn same_domain(&self, a: u32, b: u32) -> bool {
        self.nvlink.as_ref().is_some_and(|nvlink| a / nvlink.ranks == b / nvlink.ranks)
    }

    /// The links of the NVLink domains: for each rank one out and one in, for dispatch and then for combine.
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
