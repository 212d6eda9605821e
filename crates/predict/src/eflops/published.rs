//! What the article and its reprints say, and what we take for what they do not say: `data/eflops.json`.

use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::train::{Exchange, Layer, Model};

/// The file.
pub(crate) struct Data(Value);

pub(crate) static DATA: LazyLock<Data> = LazyLock::new(|| {
    Data(serde_json::from_str(include_str!("../../data/eflops.json")).expect("a test reads it"))
});

impl Data {
    pub fn source(&self) -> &Value {
        &self.0["source"]
    }

    pub fn cluster(&self) -> &Value {
        &self.0["cluster"]
    }

    pub fn constants(&self) -> &Value {
        &self.0["constants"]
    }

    /// A published figure, or `None`: not published, as far as we found.
    pub fn figure(&self, name: &str) -> Option<f64> {
        self.0["published"][name].as_f64()
    }

    /// Where a model's figures come from.
    pub fn model_source(&self, name: &str) -> Value {
        json!(self.0["models"][name]["from"])
    }

    /// A model, its gradients in float32, on `ranks` ranks; what its shards exchange goes by `algorithm`.
    pub fn model(&self, name: &str, ranks: u32, algorithm: &str) -> Model {
        let data = &self.0["models"][name];
        let compute_s = data["batch_compute_s"].as_f64().unwrap_or(0.0);
        let shares = data["shares"].as_array().map_or(&[] as &[Value], Vec::as_slice);
        let mut layers: Vec<Layer> = shares.iter().map(|share| layer(share, compute_s)).collect();
        if let Some(classifier_s) = data["classifier_s"].as_f64() {
            let features = data["features_bytes_per_rank"].as_u64().unwrap_or(0) * u64::from(ranks);
            layers.push(classifier(classifier_s, features, algorithm));
        }
        Model { name: data["name"].as_str().unwrap_or(name).into(), layers, optimizer_s: 0.0 }
    }
}

/// The backward pass takes twice as long as the forward pass.
fn layer(share: &Value, compute_s: f64) -> Layer {
    let seconds = share[2].as_f64().unwrap_or(0.0) * compute_s;
    Layer {
        name: share[0].as_str().unwrap_or_default().into(),
        forward_s: seconds / 3.0,
        backward_s: seconds * 2.0 / 3.0,
        gradient_bytes: 4 * share[1].as_u64().unwrap_or(0),
        before: Vec::new(),
        after: Vec::new(),
    }
}

/// A classifier of which each rank has a part of the classes: all ranks' features come to it, the greatest
/// logit and the sums of all classes are agreed on, and the features' gradients are added up where they came from.
fn classifier(seconds: f64, features: u64, algorithm: &str) -> Layer {
    let exchange = |collective: &str, algorithm: &str, bytes| Exchange {
        collective: collective.into(),
        algorithm: algorithm.into(),
        bytes,
    };
    // The all-gather and reduce-scatter of HDRM are those of halving-doubling between ranks that are mapped.
    let shared = if algorithm == "hdrm" { "hd" } else { algorithm };
    let shared = if shared == "tree" { "ring" } else { shared };
    Layer {
        name: "classifier".into(),
        forward_s: seconds / 3.0,
        backward_s: seconds * 2.0 / 3.0,
        gradient_bytes: 0,
        before: vec![exchange("all-gather", shared, features)],
        after: vec![
            exchange("all-reduce", algorithm, features / 2048),
            exchange("reduce-scatter", shared, features),
        ],
    }
}
