//! What a run came to.

use serde::Serialize;
use serde_json::Value;

use crate::constants::Constants;

/// What every scenario reports; each adds its own results.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Virtual time from the start to the end of the last workload.
    pub time_s: f64,
    /// The most flows that one link carried at one time.
    pub max_link_load: u32,
    /// Processor time of the simulation.
    pub cpu_s: f64,
    /// What things cost.
    pub constants: Constants,
    /// Messages sent.
    pub flows: u64,
    /// Links, the busiest first.
    pub links: Vec<LinkReport>,
    /// What the scenario itself found.
    pub results: Value,
    /// In the trace event format, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<Value>,
}

/// What one link carried.
#[derive(Clone, Debug, Serialize)]
pub struct LinkReport {
    /// The node that it leaves.
    pub from: String,
    /// The node that it reaches.
    pub to: String,
    /// Bytes carried.
    pub bytes: f64,
    /// Seconds in which it carried any.
    pub busy_s: f64,
    /// The share of the run's time in which its bandwidth was used.
    pub utilisation: f64,
    /// The most flows at one time.
    pub max_load: u32,
}
