//! Scenario cluster: network, routing, constants, faults and stragglers.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;

use crate::check::{at_least_0, more_than_0};
use crate::constants::Constants;
use crate::error::Error;
use weft_topology::{Description, Network, Routing};

/// Scenario network with routing, constants, faults and stragglers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Short form such as `bigraph:switches=16,endpoints=4`, JSON file path, or the network itself as JSON.
    pub topology: Value,
    /// `unique`, `static`, `ecmp` or `adaptive`.
    #[serde(default = "default_routing")]
    pub routing: String,
    /// Seed for the ECMP hash, jitter, arrivals and expert choice.
    #[serde(default)]
    pub seed: u64,
    /// Model constants.
    #[serde(default)]
    pub constants: ConstantOverrides,
    /// Degraded and failed links.
    #[serde(default)]
    pub faults: Vec<Fault>,
    /// Slow and late ranks.
    #[serde(default)]
    pub stragglers: Vec<Straggler>,
}

/// Maximum rank count, the same as in a group of processes; a job that sets no rank count has all endpoints.
const MOST_RANKS: u32 = 1 << 16;

/// Differences from [`Constants::ideal`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConstantOverrides {
    /// [`Constants`] fields by name.
    #[serde(default)]
    pub set: serde_json::Map<String, Value>,
}

/// Change in a link's bandwidth.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Node name at one end, for example `leaf0`.
    pub from: String,
    /// Node name at the other end.
    pub to: String,
    /// Remaining bandwidth share; 0 is a failed link.
    pub bandwidth: f64,
    /// Beginning, in seconds.
    #[serde(default)]
    pub at_s: f64,
    /// End, in seconds; permanent if absent.
    #[serde(default)]
    pub until_s: Option<f64>,
    /// True if only the direction from `from` to `to` changes.
    #[serde(default)]
    pub one_way: bool,
}

/// Slow or late rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Straggler {
    /// Rank.
    pub rank: u32,
    /// Factor on the rank's compute, reduction, copy, post and wait times.
    #[serde(default = "one")]
    pub slow: f64,
    /// Start delay in seconds.
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

    /// Network that the topology describes.
    pub fn network(&self) -> Result<Network, Error> {
        Ok(self.description()?.network()?)
    }

    /// Path selection rule.
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

    /// Checked model constants.
    pub fn constants(&self) -> Result<Constants, Error> {
        let constants = self.constants.resolve()?;
        constants.check()?;
        Ok(constants)
    }

    /// Rejects too many ranks, invalid faults, and stragglers outside `ranks` ranks.
    pub fn check(&self, ranks: u32) -> Result<(), Error> {
        if ranks > MOST_RANKS {
            let must = format!("at most {MOST_RANKS}; set the number of ranks");
            return Err(Error::field("job.ranks", ranks, must));
        }
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
        let mut named = BTreeSet::new();
        for straggler in &self.stragglers {
            if !named.insert(straggler.rank) {
                let must = "each rank once; give its slow and late_s in one entry";
                return Err(Error::field("stragglers.rank", straggler.rank, must));
            }
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
