//! What a training iteration consists of.

use serde::{Deserialize, Serialize};

use crate::check::at_least_0;
use crate::collective::CollectiveJob;
use crate::error::Error;

/// A model as its layers, forward order.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// What it is called.
    pub name: String,
    /// Its layers.
    pub layers: Vec<Layer>,
    /// The time of the optimizer, after the last gradient.
    #[serde(default)]
    pub optimizer_s: f64,
}

/// A layer, or several that are treated as one.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// What it is called.
    pub name: String,
    /// Compute on the way forward.
    pub forward_s: f64,
    /// Compute on the way back.
    pub backward_s: f64,
    /// Bytes of its gradients, which all ranks add up; 0 if its parameters are each on one rank.
    #[serde(default)]
    pub gradient_bytes: u64,
    /// Collectives that the forward pass waits for before this layer's compute.
    #[serde(default)]
    pub before: Vec<Exchange>,
    /// Collectives that the backward pass waits for after this layer's compute.
    #[serde(default)]
    pub after: Vec<Exchange>,
}

/// A collective that compute waits for, such as the features of a sharded classifier.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exchange {
    /// `all-gather`, `reduce-scatter`, ...
    pub collective: String,
    /// By which algorithm.
    pub algorithm: String,
    /// The length of the whole vector.
    pub bytes: u64,
}

/// The most layers, and the most bytes of the gradients of one.
const MOST_LAYERS: usize = 1 << 12;
const MOST_BYTES: u64 = 1 << 48;

/// What a rank does in an iteration, in this order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Item {
    /// Computes.
    Compute { seconds: f64, name: Name },
    /// Hands a collective to the rank's communication stream, and waits for it or not. The stream takes one
    /// after the other.
    Collective { kind: u32, bytes: u64, blocking: bool },
    /// Waits for all collectives.
    Join,
}

/// What a stretch of compute is called in a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Forward(u32),
    Backward(u32),
    Optimizer,
}

/// An iteration, and the kinds of collectives in it.
#[derive(Clone, Debug)]
pub(crate) struct Iteration {
    pub items: Vec<Item>,
    pub kinds: Vec<(String, String)>,
}

impl Model {
    /// Refuses times that cannot be.
    pub fn check(&self) -> Result<(), Error> {
        if self.layers.is_empty() {
            return Err(Error::field("model.layers", "an empty list", "at least one layer"));
        }
        if self.layers.len() > MOST_LAYERS {
            let must = format!("at most {MOST_LAYERS}");
            return Err(Error::field("layers of the model", self.layers.len(), must));
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

    /// Seconds of compute in an iteration.
    pub fn compute_s(&self) -> f64 {
        let layers = self.layers.iter().map(|layer| layer.forward_s + layer.backward_s);
        layers.sum::<f64>() + self.optimizer_s
    }

    /// Bytes of gradients.
    pub fn gradient_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.gradient_bytes).sum()
    }

    /// What an iteration does: gradients are gathered in buckets of at least `bucket_bytes`, in the order in
    /// which the backward pass makes them, and a bucket leaves when it is full; without `overlap`, when the
    /// backward pass is over.
    pub(crate) fn iteration(
        &self,
        job: &CollectiveJob,
        bucket_bytes: u64,
        overlap: bool,
    ) -> Iteration {
        let mut kinds = vec![(job.collective.clone(), job.algorithm.clone())];
        let mut items = Vec::new();
        let mut exchange = |items: &mut Vec<Item>, exchange: &Exchange| {
            let kind = (exchange.collective.clone(), exchange.algorithm.clone());
            let place = kinds.iter().position(|other| *other == kind).unwrap_or_else(|| {
                kinds.push(kind);
                kinds.len() - 1
            });
            let bytes = exchange.bytes;
            items.push(Item::Collective { kind: place as u32, bytes, blocking: true });
        };
        for (number, layer) in (0u32..).zip(&self.layers) {
            layer.before.iter().for_each(|before| exchange(&mut items, before));
            items.push(Item::Compute { seconds: layer.forward_s, name: Name::Forward(number) });
        }
        let mut bucket = 0;
        let mut late = Vec::new();
        let count = self.layers.len() as u32;
        for (number, layer) in (0..count).zip(&self.layers).rev() {
            items.push(Item::Compute { seconds: layer.backward_s, name: Name::Backward(number) });
            layer.after.iter().for_each(|after| exchange(&mut items, after));
            bucket += layer.gradient_bytes;
            if bucket > 0 && (bucket >= bucket_bytes || number == 0) {
                let item = Item::Collective { kind: 0, bytes: bucket, blocking: false };
                if overlap {
                    items.push(item)
                } else {
                    late.push(item)
                }
                bucket = 0;
            }
        }
        items.append(&mut late);
        items.push(Item::Join);
        items.push(Item::Compute { seconds: self.optimizer_s, name: Name::Optimizer });
        Iteration { items, kinds }
    }
}
