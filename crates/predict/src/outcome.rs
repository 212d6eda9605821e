//! Run results.

use serde::Serialize;
use serde_json::Value;

use crate::constants::Constants;

/// Results that every scenario reports, with scenario-specific ones in `results`.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Virtual time from the start until the last workload ends.
    pub time_s: f64,
    /// Maximum number of concurrent flows on a link.
    pub max_link_load: u32,
    /// Processor time that the simulation took.
    pub cpu_s: f64,
    /// Constants in this run.
    pub constants: Constants,
    /// Message count.
    pub flows: u64,
    /// Links, busiest first.
    pub links: Vec<LinkReport>,
    /// Scenario results.
    pub results: Value,
    /// Doubts about the network's description; see [`weft_topology::Network::warnings`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Trace event format, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<Value>,
}

/// Default link count in an outcome.
pub(crate) fn default_links() -> usize {
    16
}

/// Traffic on one link.
#[derive(Clone, Debug, Serialize)]
pub struct LinkReport {
    /// Source node.
    pub from: String,
    /// Destination node.
    pub to: String,
    /// Bytes.
    pub bytes: f64,
    /// Time with at least one flow.
    pub busy_s: f64,
    /// Bandwidth share in use over the run.
    pub utilisation: f64,
    /// Maximum number of concurrent flows.
    pub max_load: u32,
}
