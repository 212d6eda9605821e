//! What is asked: an iteration, its sizes and its rates.

use serde::{Deserialize, Serialize};

use crate::check::{at_least_0, from_1_to, more_than_0};
use crate::error::Error;
use crate::spec::Cluster;

const MOST_RANKS: u32 = 1024;

/// An iteration of a recommendation model on a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DlrmSpec {
    /// On what; rank `r` is endpoint `r`.
    pub cluster: Cluster,
    /// What runs.
    pub job: DlrmJob,
    /// Fused, not fused, or both beside each other.
    #[serde(default)]
    pub variant: Variant,
    /// How many links to report, the busiest first.
    #[serde(default = "crate::spec::links")]
    pub links: usize,
    /// Record up to so many spans for a trace.
    #[serde(default)]
    pub trace: usize,
}

/// An iteration of a recommendation model, wherever it runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DlrmJob {
    /// Nodes with an accelerator and its tables each.
    #[serde(default = "ranks")]
    pub ranks: u32,
    /// Whether the backward pass and the update belong to the iteration.
    #[serde(default = "yes")]
    pub training: bool,
    /// Samples of each rank.
    #[serde(default = "batch")]
    pub batch: u32,
    /// Tables of each rank.
    #[serde(default = "tables")]
    pub tables: u32,
    /// Elements of an embedding.
    #[serde(default = "dimension")]
    pub dimension: u32,
    /// Bytes of an element.
    #[serde(default = "element_bytes")]
    pub element_bytes: u32,
    /// Embeddings summed for a sample and table.
    #[serde(default = "pooling")]
    pub pooling: f64,
    /// Bytes a second of embeddings that a rank gathers.
    #[serde(default = "gather_bytes_per_s")]
    pub gather_bytes_per_s: f64,
    /// Floating-point operations of the bottom MLP for a sample, forward.
    #[serde(default = "bottom_flops")]
    pub bottom_flops: f64,
    /// The same of interaction and top MLP.
    #[serde(default = "top_flops")]
    pub top_flops: f64,
    /// Operations a second.
    #[serde(default = "flops_per_s")]
    pub flops_per_s: f64,
    /// The update of the tables, in multiples of the bytes that were gathered.
    #[serde(default = "update_passes")]
    pub update_passes: f64,
    /// Slices into which what goes to one peer is cut.
    #[serde(default = "one")]
    pub slices_per_peer: u32,
    /// How much longer pooling takes in the fused kernel, as a share.
    #[serde(default)]
    pub fused_overhead: f64,
}

/// What is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// Slices leave as they are computed.
    Fused,
    /// The exchange begins when all is computed.
    Unfused,
    /// One after the other, each on a network of its own.
    #[default]
    Both,
}

impl DlrmJob {
    /// Refuses what cannot be.
    pub fn check(&self) -> Result<(), Error> {
        let counts = [
            ("ranks", self.ranks, MOST_RANKS),
            ("batch", self.batch, u32::MAX),
            ("tables", self.tables, u32::MAX),
            ("dimension", self.dimension, u32::MAX),
            ("element_bytes", self.element_bytes, 64),
            ("slices_per_peer", self.slices_per_peer, 256),
        ];
        for (field, value, most) in counts {
            from_1_to(most.into(), field, value)?;
        }
        let sizes = [self.batch, self.tables, self.dimension, self.element_bytes];
        let bytes: u128 = sizes.into_iter().map(u128::from).product();
        if bytes > 1 << 50 {
            return Err(Error::field("bytes for one peer", bytes, "at most 2^50"));
        }
        for (field, value) in
            [("gather_bytes_per_s", self.gather_bytes_per_s), ("flops_per_s", self.flops_per_s)]
        {
            more_than_0(field, value)?;
        }
        for (field, value) in [
            ("pooling", self.pooling),
            ("bottom_flops", self.bottom_flops),
            ("top_flops", self.top_flops),
            ("update_passes", self.update_passes),
            ("fused_overhead", self.fused_overhead),
        ] {
            at_least_0(field, value)?;
        }
        Ok(())
    }

    /// Bytes of pooled vectors that one rank sends another one.
    pub fn bytes_for_peer(&self) -> u64 {
        let samples = u64::from(self.batch) * u64::from(self.tables);
        samples * u64::from(self.dimension) * u64::from(self.element_bytes)
    }

    /// Seconds in which a rank pools for everybody.
    pub fn pooling_s(&self) -> f64 {
        let gathered = self.bytes_for_peer() as f64 * f64::from(self.ranks) * self.pooling;
        gathered / self.gather_bytes_per_s
    }

    /// Seconds of an MLP of so many operations for a sample.
    pub(super) fn mlp_s(&self, flops: f64) -> f64 {
        flops * f64::from(self.batch) / self.flops_per_s
    }
}

fn yes() -> bool {
    true
}

fn one() -> u32 {
    1
}

fn ranks() -> u32 {
    128
}

fn batch() -> u32 {
    256
}

fn tables() -> u32 {
    8
}

fn dimension() -> u32 {
    128
}

fn element_bytes() -> u32 {
    4
}

fn pooling() -> f64 {
    64.0
}

fn gather_bytes_per_s() -> f64 {
    1.6e12
}

fn bottom_flops() -> f64 {
    10e6
}

fn top_flops() -> f64 {
    40e6
}

fn flops_per_s() -> f64 {
    20e12
}

fn update_passes() -> f64 {
    1.0
}
