//! Cluster of a scenario: network, routing, constants, faults and stragglers.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::check::{at_least_0, more_than_0};
use crate::constants::Constants;
use crate::error::Error;
use weft_topology::{Description, Network, Routing};

/// Network of a scenario with its routing, constants, faults and stragglers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Short form such as `bigraph:switches=16,endpoints=4`, path of a JSON file, or the network itself as
    /// JSON.
    pub topology: Value,
    /// `unique`, `static`, `ecmp` or `adaptive`.
    #[serde(default = "default_routing")]
    pub routing: String,
    /// Seed of ECMP's hash, jitter, arrivals and expert choice.
    #[serde(default)]
    pub seed: u64,
    /// Constants of the model.
    #[serde(default)]
    pub constants: ConstantOverrides,
    /// Degraded and failed links.
    #[serde(default)]
    pub faults: Vec<Fault>,
    /// Slow and late ranks.
    #[serde(default)]
    pub stragglers: Vec<Straggler>,
}

/// Differences from [`Constants::ideal`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConstantOverrides {
    /// Fields of [`Constants`] by name.
    #[serde(default)]
    pub set: serde_json::Map<String, Value>,
}

/// Change of a link's bandwidth.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Name of the node at one end.
    pub from: String,
    /// Name of the node at the other end.
    pub to: String,
    /// Remaining share of the bandwidth; 0 is a failed link.
    pub bandwidth: f64,
    /// Beginning, in seconds.
    #[serde(default)]
    pub at_s: f64,
    /// End, in seconds; permanent if absent.
    #[serde(default)]
    pub until_s: Option<f64>,
    /// Direction from `from` to `to` alone.
    #[serde(default)]
    pub one_way: bool,
}

/// Slow or late rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Straggler {
    /// Rank.
    pub rank: u32,
    /// Factor on the times of its compute, reductions, copies, posts and waits.
    #[serde(default = "one")]
    pub slow: f64,
    /// Delay of its start, in seconds.
    #[serde(default)]
    pub late_s: f64,
}

fn default_routing() -> String {
    "static".into()
}

fn one() -> f64 {
    1.0
}

impl Cluster {
    /// Parsed topology.
    pub fn description(&self) -> Result<Description, Error> {
        Ok(match &self.topology {
            Value::String(spec) => Description::parse(spec)?,
            value => Description::from_json(&value.to_string())?,
        })
    }

    /// Network of the topology.
    pub fn network(&self) -> Result<Network, Error> {
        Ok(self.description()?.network()?)
    }

    /// Rule of path selection.
    pub fn routing(&self) -> Result<Routing, Error> {
        Ok(match self.routing.as_str() {
            "unique" => Routing::Unique,
            "static" => Routing::Static,
            "ecmp" => Routing::Ecmp { seed: self.seed },
            "adaptive" => Routing::Adaptive,
            other => {
                let must = "unique, static, ecmp or adaptive";
                return Err(Error::field("cluster.routing", other, must));
            }
        })
    }

    /// Checked constants of the model.
    pub fn constants(&self) -> Result<Constants, Error> {
        let constants = self.constants.resolve()?;
        constants.check()?;
        Ok(constants)
    }

    /// Rejects invalid faults, and stragglers outside of `ranks` ranks.
    pub fn check(&self, ranks: u32) -> Result<(), Error> {
        for fault in &self.faults {
            let until = fault.until_s.unwrap_or(f64::INFINITY);
            if !(0.0..=1.0).contains(&fault.bandwidth) {
                return Err(Error::field("faults.bandwidth", fault.bandwidth, "from 0 to 1"));
            }
            if !(fault.at_s >= 0.0 && fault.at_s.is_finite() && until > fault.at_s) {
                return Err(Error::field(
                    "faults.at_s",
                    fault.at_s,
                    "at least 0 and before until_s",
                ));
            }
        }
        for straggler in &self.stragglers {
            if straggler.rank >= ranks {
                let must = format!("one of 0 to {}", ranks - 1);
                return Err(Error::field("stragglers.rank", straggler.rank, must));
            }
            more_than_0("stragglers.slow", straggler.slow)?;
            at_least_0("stragglers.late_s", straggler.late_s)?;
        }
        Ok(())
    }
}

impl ConstantOverrides {
    /// All constants: the ideal ones with these changes.
    pub fn resolve(&self) -> Result<Constants, Error> {
        let mut value = serde_json::to_value(Constants::ideal())?;
        if let Value::Object(fields) = &mut value {
            fields.extend(self.set.clone());
        }
        Ok(serde_json::from_value(value)?)
    }
}
