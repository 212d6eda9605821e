//! Query traffic job: nodes, arrivals, sizes, policy.

use serde::{Deserialize, Serialize};

use crate::check::{at_least_0, from_1_to, more_than_0};
use crate::cluster::Cluster;
use crate::error::Error;

const MOST_QUERIES: u64 = 1 << 24;
const MOST_CONNECTIONS: u64 = 1 << 22;

/// Query traffic on a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueryScenario {
    /// Network with its conditions.
    pub cluster: Cluster,
    /// Workload.
    pub job: QueryJob,
    /// Number of reported links, busiest first.
    #[serde(default = "crate::outcome::default_links")]
    pub links: usize,
    /// Maximum spans in the trace; 0 for no trace.
    #[serde(default)]
    pub trace: usize,
}

/// Query traffic, without a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueryJob {
    /// Front ends: the endpoints from `first_endpoint` on.
    pub front_ends: u32,
    /// Accelerators: the endpoints after the front ends.
    pub accelerators: u32,
    /// First endpoint among the front ends.
    #[serde(default)]
    pub first_endpoint: u32,
    /// Query count.
    #[serde(default = "queries")]
    pub queries: u64,
    /// Arrival process.
    #[serde(default)]
    pub arrivals: Arrivals,
    /// Queries per second over all front ends; absent for offline arrivals.
    #[serde(default)]
    pub rate_per_s: Option<f64>,
    /// Bytes per query.
    #[serde(default = "query_bytes")]
    pub query_bytes: u64,
    /// Bytes per response.
    #[serde(default = "answer_bytes")]
    pub answer_bytes: u64,
    /// Service time per query.
    #[serde(default = "service_s")]
    pub service_s: f64,
    /// Queries in flight per connection.
    #[serde(default = "slots")]
    pub slots: u32,
    /// Policy that chooses the accelerator.
    #[serde(default)]
    pub policy: Policy,
}

/// Arrival process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arrivals {
    /// Poisson process.
    #[default]
    Poisson,
    /// Equal intervals.
    Uniform,
    /// All at the start, for the maximum throughput.
    Offline,
}

/// Policy that chooses the accelerator for a query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Accelerators in turn, for each front end.
    #[default]
    RoundRobin,
    /// Accelerator with the fewest outstanding queries from this front end; ties go to the next in turn.
    LeastLoaded,
    /// Uniformly random.
    Random,
}

impl QueryJob {
    /// Rejects invalid values.
    pub fn check(&self) -> Result<(), Error> {
        let connections = u64::from(self.front_ends) * u64::from(self.accelerators);
        for (field, value, most) in [
            ("front_ends", u64::from(self.front_ends), 1 << 16),
            ("accelerators", u64::from(self.accelerators), 1 << 16),
            ("front_ends times accelerators", connections, MOST_CONNECTIONS),
            ("queries", self.queries, MOST_QUERIES),
            ("slots", u64::from(self.slots), 1 << 20),
        ] {
            from_1_to(most, field, value)?;
        }
        at_least_0("service_s", self.service_s)?;
        match (self.arrivals, self.rate_per_s) {
            (Arrivals::Offline, None) => Ok(()),
            (Arrivals::Offline, Some(rate)) => {
                Err(Error::field("rate_per_s", rate, "no value for offline arrivals"))
            }
            (_, Some(rate)) => more_than_0("rate_per_s", rate),
            (_, None) => Err(Error::field("rate_per_s", "missing", "more than 0")),
        }
    }
}

fn queries() -> u64 {
    10_000
}

fn query_bytes() -> u64 {
    150_528
}

fn answer_bytes() -> u64 {
    4000
}

fn service_s() -> f64 {
    100e-6
}

fn slots() -> u32 {
    64
}
