//! Scenarios for all workloads: JSON in, JSON out.

use serde::{Deserialize, Serialize};

use crate::collective::CollectiveScenario;
use crate::dlrm::DlrmScenario;
use crate::error::Error;
use crate::mixture::MixtureScenario;
use crate::moe::MoeScenario;
use crate::outcome::Outcome;
use crate::progress::Progress;
use crate::query::QueryScenario;
use crate::train::TrainScenario;

/// Workload with a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "scenario", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Scenario {
    /// One collective.
    Collective(CollectiveScenario),
    /// Training iterations.
    Train(TrainScenario),
    /// Concurrent jobs on one network.
    Mixture(MixtureScenario),
    /// Mixture-of-experts dispatch and combine.
    Moe(MoeScenario),
    /// Recommendation model iteration.
    Dlrm(DlrmScenario),
    /// Queries and responses.
    Query(QueryScenario),
}

impl Scenario {
    /// Parses a scenario.
    pub fn from_json(json: &str) -> Result<Scenario, Error> {
        Ok(serde_json::from_str(json)?)
    }

    /// Runs the scenario until it ends.
    pub fn run(&self, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
        match self {
            Scenario::Collective(scenario) => crate::collective::run(scenario, progress),
            Scenario::Train(scenario) => crate::train::run(scenario, progress),
            Scenario::Mixture(scenario) => crate::mixture::run(scenario, progress),
            Scenario::Moe(scenario) => crate::moe::run(scenario, progress),
            Scenario::Dlrm(scenario) => crate::dlrm::run(scenario, progress),
            Scenario::Query(scenario) => crate::query::run(scenario, progress),
        }
    }
}

/// Runs the scenario `json` and returns the outcome as JSON.
pub fn run(json: &str, progress: &mut Progress<'_>) -> Result<String, Error> {
    Ok(serde_json::to_string(&Scenario::from_json(json)?.run(progress)?)?)
}
