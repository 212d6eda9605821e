//! What is asked: who queries whom, when and with how many bytes.

use serde::{Deserialize, Serialize};

use crate::check::{at_least_0, from_1_to, more_than_0};
use crate::error::Error;
use crate::spec::Cluster;

const MOST_QUERIES: u64 = 1 << 24;
const MOST_CONNECTIONS: u64 = 1 << 22;

/// Query traffic on a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuerySpec {
    /// On what.
    pub cluster: Cluster,
    /// What runs.
    pub job: QueryJob,
    /// How many links to report, the busiest first.
    #[serde(default = "crate::spec::links")]
    pub links: usize,
    /// Record up to so many spans for a trace.
    #[serde(default)]
    pub trace: usize,
}

/// Query traffic, wherever it runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueryJob {
    /// Nodes that take queries: endpoints from `first_endpoint` on.
    pub front_ends: u32,
    /// Nodes that answer them: the endpoints after the front ends'.
    pub accelerators: u32,
    /// The first endpoint of the front ends.
    #[serde(default)]
    pub first_endpoint: u32,
    /// Queries in all.
    #[serde(default = "queries")]
    pub queries: u64,
    /// When they come.
    #[serde(default)]
    pub arrivals: Arrivals,
    /// Queries a second, of all front ends together; not needed when all come at once.
    #[serde(default)]
    pub rate_per_s: Option<f64>,
    /// Bytes of a query.
    #[serde(default = "query_bytes")]
    pub query_bytes: u64,
    /// Bytes of an answer.
    #[serde(default = "answer_bytes")]
    pub answer_bytes: u64,
    /// How long an accelerator takes for one.
    #[serde(default = "service_s")]
    pub service_s: f64,
    /// Queries of one front end that may be under way to one accelerator.
    #[serde(default = "slots")]
    pub slots: u32,
    /// Who answers a query.
    #[serde(default)]
    pub policy: Policy,
}

/// When queries come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arrivals {
    /// Independently of each other, at a mean rate.
    #[default]
    Poisson,
    /// At equal distances.
    Uniform,
    /// All at the start: how much can be had.
    Offline,
}

/// Who answers a query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Each front end asks accelerators in turn.
    #[default]
    RoundRobin,
    /// The one that owes this front end the fewest answers; the first after the last one asked, of several.
    LeastLoaded,
    /// Any, alike.
    Random,
}

impl QueryJob {
    /// Refuses what cannot be.
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
                Err(Error::field("rate_per_s", rate, "left out when all queries come at once"))
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
