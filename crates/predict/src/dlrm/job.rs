//! Recommendation model job: sizes and rates in an iteration.

use serde::{Deserialize, Serialize};

use crate::check::{at_least_0, from_1_to, more_than_0};
use crate::cluster::Cluster;
use crate::error::Error;

const MOST_RANKS: u32 = 1024;

/// Recommendation model iteration on a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DlrmScenario {
    /// Network with its conditions; rank `r` is endpoint `r`.
    pub cluster: Cluster,
    /// Workload.
    pub job: DlrmJob,
    /// Fused, unfused, or both runs.
    #[serde(default)]
    pub variant: Variant,
    /// Number of reported links, busiest first.
    #[serde(default = "crate::outcome::default_links")]
    pub links: usize,
    /// Maximum spans in the trace; 0 for no trace.
    #[serde(default)]
    pub trace: usize,
}

/// Recommendation model iteration, without a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DlrmJob {
    /// Node count; each has an accelerator and tables.
    #[serde(default = "ranks")]
    pub ranks: u32,
    /// True if the iteration includes the backward pass and the update.
    #[serde(default = "yes")]
    pub training: bool,
    /// Samples per rank.
    #[serde(default = "batch")]
    pub batch: u32,
    /// Tables per rank.
    #[serde(default = "tables")]
    pub tables: u32,
    /// Elements per embedding.
    #[serde(default = "dimension")]
    pub dimension: u32,
    /// Bytes per element.
    #[serde(default = "element_bytes")]
    pub element_bytes: u32,
    /// Embeddings summed per sample and table.
    #[serde(default = "pooling")]
    pub pooling: f64,
    /// Gather rate for embeddings, in bytes per second.
    #[serde(default = "gather_bytes_per_s")]
    pub gather_bytes_per_s: f64,
    /// Floating-point operations in the bottom MLP per sample, forward.
    #[serde(default = "bottom_flops")]
    pub bottom_flops: f64,
    /// The same for interaction and top MLP.
    #[serde(default = "top_flops")]
    pub top_flops: f64,
    /// Floating-point rate, in operations per second.
    #[serde(default = "flops_per_s")]
    pub flops_per_s: f64,
    /// Table update size, in multiples of the gathered bytes.
    #[serde(default = "update_passes")]
    pub update_passes: f64,
    /// Slices per peer.
    #[serde(default = "one")]
    pub slices_per_peer: u32,
    /// Extra pooling time in the fused kernel, as a share.
    #[serde(default)]
    pub fused_overhead: f64,
}

/// Order between pooling and all-to-all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// Slices are sent as they are computed.
    Fused,
    /// The all-to-all begins after pooling.
    Unfused,
    /// Two runs, each on an idle network.
    #[default]
    Both,
}

impl DlrmJob {
    /// Rejects invalid values.
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

    /// Pooled vector bytes from one rank to a peer.
    pub fn bytes_for_peer(&self) -> u64 {
        let samples = u64::from(self.batch) * u64::from(self.tables);
        samples * u64::from(self.dimension) * u64::from(self.element_bytes)
    }

    /// A rank's pooling time, for the samples on all ranks.
    pub fn pooling_s(&self) -> f64 {
        let gathered = self.bytes_for_peer() as f64 * f64::from(self.ranks) * self.pooling;
        gathered / self.gather_bytes_per_s
    }

    /// MLP time with `flops` operations per sample.
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
