//! Scenarios as JSON.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::check::{at_least_0, more_than_0};
use crate::constants::Constants;
use crate::error::Error;
use weft_topology::{Description, Network, Routing};

/// A scenario: what runs, on what.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "scenario", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Spec {
    /// One collective.
    Collective(crate::collective::CollectiveSpec),
    /// Training.
    Train(crate::train::TrainSpec),
    /// The EFLOPS article.
    Eflops(crate::eflops::EflopsSpec),
    /// Several jobs that compete for links.
    Mixture(crate::mixture::MixtureSpec),
    /// Mixture-of-experts dispatch and combine.
    Moe(crate::moe::MoeSpec),
    /// A recommendation model.
    Dlrm(crate::dlrm::DlrmSpec),
    /// Queries and answers.
    Query(crate::query::QuerySpec),
}

/// The network, its routes, its constants, and what is wrong with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// A short form such as `bigraph:switches=16,endpoints=4`, the path of a JSON file, or the network itself
    /// as JSON.
    pub topology: Value,
    /// `unique`, `static`, `ecmp` or `adaptive`.
    #[serde(default = "default_routing")]
    pub routing: String,
    /// Of ECMP's hash and of jitter.
    #[serde(default)]
    pub seed: u64,
    /// What things cost.
    #[serde(default)]
    pub constants: ConstantsSpec,
    /// Links that are slow or broken.
    #[serde(default)]
    pub faults: Vec<Fault>,
    /// Ranks that are slow or late.
    #[serde(default)]
    pub stragglers: Vec<Straggler>,
}

/// Constants to start from, and those that differ.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConstantsSpec {
    /// The constants to start from.
    #[serde(default)]
    pub preset: Preset,
    /// Fields of [`Constants`] that differ from the preset's.
    #[serde(default)]
    pub set: serde_json::Map<String, Value>,
}

/// A named set of constants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// Bandwidth and latency alone.
    #[default]
    Ideal,
    /// What the EFLOPS article leaves open, fitted; see `docs/eflops.md`.
    Eflops,
}

/// A link whose bandwidth changes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// The name of the node at one end.
    pub from: String,
    /// The name of the node at the other end.
    pub to: String,
    /// The share of its bandwidth that is left; 0 is a failed link.
    pub bandwidth: f64,
    /// From when, in seconds.
    #[serde(default)]
    pub at_s: f64,
    /// Until when; for ever if left out.
    #[serde(default)]
    pub until_s: Option<f64>,
    /// Only from `from` to `to`, and not back.
    #[serde(default)]
    pub one_way: bool,
}

/// A rank that is slow or late.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Straggler {
    /// Which rank.
    pub rank: u32,
    /// How many times as long its compute, reductions and copies, posts and waits take.
    #[serde(default = "one")]
    pub slow: f64,
    /// How much later than the others it starts, in seconds.
    #[serde(default)]
    pub late_s: f64,
}

/// How many links an outcome reports unless it is said.
pub(crate) fn links() -> usize {
    16
}

fn default_routing() -> String {
    "unique".into()
}

fn one() -> f64 {
    1.0
}

impl Spec {
    /// Reads a scenario.
    ///
    /// The model of a training job may be the name of one that the EFLOPS article has:
    /// `resnet50`, `million-class` or `bert`.
    pub fn from_json(json: &str) -> Result<Spec, Error> {
        let mut value: Value = serde_json::from_str(json)?;
        crate::eflops::name_models(&mut value)?;
        Ok(serde_json::from_value(value)?)
    }
}

impl Cluster {
    /// What the topology describes.
    pub fn description(&self) -> Result<Description, Error> {
        Ok(match &self.topology {
            Value::String(spec) => Description::parse(spec)?,
            value => Description::from_json(&value.to_string())?,
        })
    }

    /// The network that the topology names.
    pub fn network(&self) -> Result<Network, Error> {
        Ok(self.description()?.network()?)
    }

    /// How routes are chosen.
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

    /// What things cost.
    pub fn constants(&self) -> Result<Constants, Error> {
        let constants = self.constants.resolve()?;
        constants.check()?;
        Ok(constants)
    }

    /// Refuses faults and stragglers that cannot be, among `ranks` ranks.
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

impl ConstantsSpec {
    /// The preset with what differs from it.
    pub fn resolve(&self) -> Result<Constants, Error> {
        let preset = match self.preset {
            Preset::Ideal => Constants::ideal(),
            Preset::Eflops => Constants::eflops(),
        };
        let mut value = serde_json::to_value(preset)?;
        if let Value::Object(fields) = &mut value {
            fields.extend(self.set.clone());
        }
        Ok(serde_json::from_value(value)?)
    }
}
