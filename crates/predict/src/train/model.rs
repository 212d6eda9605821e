//! Models as layers, and the program for a training iteration.

use serde::{Deserialize, Serialize};

use crate::check::at_least_0;
use crate::collective::CollectiveJob;
use crate::error::Error;

/// Model: layers in forward order.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Name.
    pub name: String,
    /// Layers.
    pub layers: Vec<Layer>,
    /// Optimizer time, after the last reduction.
    #[serde(default)]
    pub optimizer_s: f64,
}

/// Layer, or several as one.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Name.
    pub name: String,
    /// Forward time.
    pub forward_s: f64,
    /// Backward time.
    pub backward_s: f64,
    /// Gradient bytes to reduce; 0 for parameters sharded over ranks.
    #[serde(default)]
    pub gradient_bytes: u64,
    /// Blocking collectives before the forward compute.
    #[serde(default)]
    pub before: Vec<Exchange>,
    /// Blocking collectives after the backward compute.
    #[serde(default)]
    pub after: Vec<Exchange>,
}

/// Blocking collective, such as the feature all-gather for a sharded classifier.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exchange {
    /// `all-gather`, `reduce-scatter`, ...
    pub collective: String,
    /// Algorithm.
    pub algorithm: String,
    /// Whole vector length in bytes.
    pub bytes: u64,
}

/// Maximum layer count, and maximum gradient bytes per layer.
const MOST_LAYERS: usize = 1 << 12;
const MOST_BYTES: u64 = 1 << 48;

/// A rank's operation in an iteration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Operation {
    /// Compute.
    Compute { seconds: f64, name: ComputeName },
    /// Collective, enqueued on the rank's communication stream; `blocking` waits for it. The stream is serial.
    Collective { kind: u32, bytes: u64, blocking: bool },
    /// Wait for all collectives.
    WaitAll,
}

/// Name for a compute span in a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ComputeName {
    Forward(u32),
    Backward(u32),
    Optimizer,
}

/// Iteration program, and its kinds of collectives: collective and algorithm.
#[derive(Clone, Debug)]
pub(crate) struct IterationProgram {
    pub operations: Vec<Operation>,
    pub kinds: Vec<(String, String)>,
}

impl Model {
    /// Rejects invalid times and sizes.
    pub fn check(&self) -> Result<(), Error> {
        if self.layers.is_empty() {
            return Err(Error::field("model.layers", "an empty list", "at least one layer"));
        }
        if self.layers.len() > MOST_LAYERS {
            let must = format!("at most {MOST_LAYERS}");
            return Err(Error::field("model layers", self.layers.len(), must));
        }
        if let Some(layer) = self.layers.iter().find(|layer| layer.gradient_bytes > MOST_BYTES) {
            let field = format!("model.layers.{}.gradient_bytes", layer.name);
            return Err(Error::field(field, layer.gradient_bytes, format!("at most {MOST_BYTES}")));
        }
        let times = self.layers.iter().flat_map(|layer| {
            [("forward_s", layer.forward_s), ("backward_s", layer.backward_s)]
                .map(|(field, value)| (format!("model.layers.{}.{field}", layer.name), value))
        });
        for (field, value) in times.chain([("model.optimizer_s".to_string(), self.optimizer_s)]) {
            at_least_0(field, value)?;
        }
        Ok(())
    }

    /// Compute time per iteration.
    pub fn compute_s(&self) -> f64 {
        let layers = self.layers.iter().map(|layer| layer.forward_s + layer.backward_s);
        layers.sum::<f64>() + self.optimizer_s
    }

    /// Gradient bytes in all layers.
    pub fn gradient_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.gradient_bytes).sum()
    }

    /// Iteration program. Gradients fill buckets that hold at least `bucket_bytes`, in backward pass order; a full
    /// bucket is reduced at once, or after the backward pass without `overlap`.
    pub(crate) fn iteration(
        &self,
        job: &CollectiveJob,
        bucket_bytes: u64,
        overlap: bool,
    ) -> IterationProgram {
        let mut kinds = vec![(job.collective.clone(), job.algorithm.clone())];
        let mut operations = Vec::new();
        let mut exchange = |operations: &mut Vec<Operation>, exchange: &Exchange| {
            let kind = (exchange.collective.clone(), exchange.algorithm.clone());
            let place = kinds.iter().position(|other| *other == kind).unwrap_or_else(|| {
                kinds.push(kind);
                kinds.len() - 1
            });
            let bytes = exchange.bytes;
            operations.push(Operation::Collective { kind: place as u32, bytes, blocking: true });
        };
        for (number, layer) in (0u32..).zip(&self.layers) {
            layer.before.iter().for_each(|before| exchange(&mut operations, before));
            operations.push(Operation::Compute {
                seconds: layer.forward_s,
                name: ComputeName::Forward(number),
            });
        }
        let mut bucket = 0;
        let mut after_backward = Vec::new();
        let count = self.layers.len() as u32;
        for (number, layer) in (0..count).zip(&self.layers).rev() {
            operations.push(Operation::Compute {
                seconds: layer.backward_s,
                name: ComputeName::Backward(number),
            });
            layer.after.iter().for_each(|after| exchange(&mut operations, after));
            bucket += layer.gradient_bytes;
            if bucket > 0 && (bucket >= bucket_bytes || number == 0) {
                let item = Operation::Collective { kind: 0, bytes: bucket, blocking: false };
                if overlap {
                    operations.push(item)
                } else {
                    after_backward.push(item)
                }
                bucket = 0;
            }
        }
        operations.append(&mut after_backward);
        operations.push(Operation::WaitAll);
        operations
            .push(Operation::Compute { seconds: self.optimizer_s, name: ComputeName::Optimizer });
        IterationProgram { operations, kinds }
    }
}
