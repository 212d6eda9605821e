//! Node description, as the command line and Python pass it.

use crate::error::{Error, Result};
use crate::model::Model;
use crate::network::End;
use crate::node::NodeConfig;
use serde::Deserialize;
use std::time::Duration;
use weft_dispatch::wire::{DataType, Dimension, Tensor};
use weft_dispatch::{AcceleratorConfig, Schema};

/// A node.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeSpec {
    /// Address to listen at; port 0 is any free port.
    pub address: String,
    /// Name, unique among a front end's nodes; empty: the address.
    pub name: String,
    /// Query tensors.
    pub inputs: Vec<TensorSpec>,
    /// Answer tensors.
    pub outputs: Vec<TensorSpec>,
    /// `shm` or `tcp`; `None`: both.
    pub provider: Option<String>,
    /// Maximum queries in flight per front end.
    pub slots: u32,
    /// Payload checksums.
    pub checksum: bool,
    /// Most front ends at a time.
    pub front_ends: u32,
    /// Maximum queries per batch.
    pub max_batch: u32,
    /// Time for which a batch waits for more queries, microseconds.
    pub window_us: u64,
    /// Time without work in which the node polls without a pause, microseconds.
    #[serde(default)]
    pub spin_us: u64,
    /// NUMA node for slot memory.
    #[serde(default)]
    pub numa_node: Option<u32>,
    /// Model; unused with a Python callable.
    #[serde(default)]
    pub model: Model,
}

/// A tensor.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// Name.
    pub name: String,
    /// Element type, by numpy's name; `bfloat16` too.
    pub dtype: String,
    /// Dimensions.
    pub shape: Vec<DimensionSpec>,
}

/// A dimension.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged)]
pub enum DimensionSpec {
    /// The same in each query.
    Fixed(u64),
    /// From 0 to this bound.
    Variable {
        /// Bound.
        up_to: u64,
    },
    /// Answer tokens, which arrive in parts.
    Tokens {
        /// Bound.
        tokens: u64,
    },
}

impl TensorSpec {
    fn tensor(&self) -> Result<Tensor> {
        let known = [
            ("uint8", DataType::U8),
            ("int8", DataType::I8),
            ("int32", DataType::I32),
            ("int64", DataType::I64),
            ("float16", DataType::F16),
            ("bfloat16", DataType::Bf16),
            ("float32", DataType::F32),
            ("float64", DataType::F64),
        ];
        let Some((_, dtype)) = known.iter().find(|(name, _)| *name == self.dtype) else {
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            let (value, expected) = (format!("{:?}", self.dtype), names.join(", "));
            return Err(Error::Invalid { what: "dtype of a tensor", value, expected });
        };
        let shape: Vec<Dimension> = self
            .shape
            .iter()
            .map(|size| match *size {
                DimensionSpec::Fixed(size) => Dimension::Fixed(size),
                DimensionSpec::Variable { up_to } => Dimension::UpTo(up_to),
                DimensionSpec::Tokens { tokens } => Dimension::Tokens(tokens),
            })
            .collect();
        Ok(Tensor::new(&self.name, *dtype, &shape))
    }
}

impl NodeSpec {
    /// The description in JSON.
    ///
    /// # Errors
    /// [`Error::Json`].
    pub fn from_json(text: &str) -> Result<NodeSpec> {
        serde_json::from_str(text).map_err(|source| Error::Json { what: "node", source })
    }

    /// The configuration that it describes.
    ///
    /// # Errors
    /// [`Error::Invalid`]; [`weft_dispatch::Error::Schema`].
    pub fn config(&self) -> Result<NodeConfig> {
        let tensors =
            |specs: &[TensorSpec]| specs.iter().map(TensorSpec::tensor).collect::<Result<_>>();
        let schema = Schema { inputs: tensors(&self.inputs)?, outputs: tensors(&self.outputs)? };
        schema.check()?;
        let spin = Duration::from_micros(self.spin_us);
        let mut end = End { slots: self.slots, checksum: self.checksum, spin, ..End::default() };
        end.numa_node = self.numa_node;
        if let Some(name) = &self.provider {
            end.providers = End::providers_named(name)?;
        }
        let window = Duration::from_micros(self.window_us);
        let (front_ends, max_batch) = (self.front_ends, self.max_batch);
        let batches = AcceleratorConfig { front_ends, max_batch, window, ..Default::default() };
        let (address, name) = (self.address.clone(), self.name.clone());
        let handshakes = NodeConfig::HANDSHAKES;
        Ok(NodeConfig { address, name, schema, batches, handshakes, end })
    }
}

#[cfg(test)]
mod tests {
    use super::NodeSpec;

    const SPEC: &str = r#"{"address": "127.0.0.1:0", "name": "", "provider": "tcp", "slots": 8,
        "inputs": [{"name": "ids", "dtype": "int64", "shape": [2, {"up_to": 5}]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [3]}], "checksum": true,
        "front_ends": 1, "max_batch": 4, "window_us": 10}"#;

    #[test]
    fn a_description_becomes_a_schema() {
        let config = NodeSpec::from_json(SPEC).unwrap().config().unwrap();
        assert_eq!(config.schema.to_string(), "(ids I64[2, <=5]) -> (y F32[3])");
        assert_eq!(config.end.providers.len(), 1);
    }

    #[test]
    fn errors_name_the_value_or_the_field() {
        let text = SPEC.replace("int64", "int16");
        let error = NodeSpec::from_json(&text).unwrap().config().unwrap_err().to_string();
        assert!(error.starts_with("dtype of a tensor \"int16\": expected uint8"), "{error}");
        let error = NodeSpec::from_json("{}").unwrap_err().to_string();
        assert!(error.contains("address"), "{error}");
    }
}
