//! Test description, as the command line passes it.

use crate::error::{Error, Result};
use crate::model::Model;
use crate::network::End;
use serde::Deserialize;
use std::path::PathBuf;
use std::time::Duration;
use weft_dispatch::Policy;
use weft_loadgen::{LoadGen, Mode, Scenario, Settings};

/// LoadGen test.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// LoadGen's library.
    pub library: PathBuf,
    /// `SingleStream`, `MultiStream`, `Server` or `Offline`.
    pub scenario: String,
    /// `performance`, `accuracy` or `submission`.
    pub mode: String,
    /// Model name, which selects lines in configuration files.
    pub model: String,
    /// `user.conf`.
    pub user_conf: Option<PathBuf>,
    /// `audit.config`, which need not exist.
    pub audit_config: PathBuf,
    /// Existing log directory.
    pub log_directory: PathBuf,
    /// LoadGen settings; `user_conf` settings come before them.
    pub settings: Values,
    /// Samples.
    pub samples: SamplesSpec,
    /// Nodes; without addresses the model runs in this process.
    pub nodes: Vec<String>,
    /// Connections.
    pub network: NetworkSpec,
    /// Model for a test in this process.
    pub in_process: InProcessSpec,
}

/// LoadGen settings that differ from the defaults.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Values {
    /// Queries per second: the Server rate, an estimate in other scenarios.
    pub target_qps: Option<f64>,
    /// Server latency limit, milliseconds.
    pub target_latency_ms: Option<f64>,
    /// Samples per MultiStream query.
    pub samples_per_query: Option<u64>,
    /// Least duration, milliseconds.
    pub min_duration_ms: Option<u64>,
    /// Most duration, milliseconds.
    pub max_duration_ms: Option<u64>,
    /// Least queries.
    pub min_query_count: Option<u64>,
    /// Most queries.
    pub max_query_count: Option<u64>,
    /// Queries that are due together are issued together, in Server.
    pub coalesce: bool,
}

/// Test samples.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplesSpec {
    /// Data set size in samples.
    pub total: usize,
    /// Samples in memory at a time.
    pub performance: usize,
    /// Sample size in bytes. On a network, a sample is all tensors concatenated.
    pub bytes: u64,
    /// File with all samples; `None`: made up.
    pub file: Option<PathBuf>,
}

/// Test connections.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NetworkSpec {
    /// `shm` or `tcp`; `None`: the better one that reaches a node.
    pub provider: Option<String>,
    /// Most queries in flight to a node.
    pub slots: u32,
    /// Most queries in flight together.
    pub queries: u32,
    /// Node selection: `round-robin`, `least-in-flight` or `latency-aware`.
    pub policy: String,
    /// Payload checksums.
    pub checksum: bool,
    /// Query deadline, seconds from submission.
    pub deadline_s: f64,
    /// Time without work in which the service polls without a pause, microseconds.
    pub spin_us: u64,
    /// NUMA node for slot memory.
    pub numa_node: Option<u32>,
    /// Maximum bytes reserved for a connection's slots; the node's schema determines the size.
    pub max_slot_bytes: u64,
    /// Answers kept by sample, against the rules: for the audit's own test.
    pub keep_answers: usize,
}

impl Default for NetworkSpec {
    fn default() -> NetworkSpec {
        NetworkSpec {
            provider: None,
            slots: 1024,
            queries: 8192,
            policy: "least-in-flight".into(),
            checksum: false,
            deadline_s: 60.0,
            spin_us: 0,
            numa_node: None,
            max_slot_bytes: End::default().max_slot_bytes,
            keep_answers: 0,
        }
    }
}

/// Model for a test without a network.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InProcessSpec {
    /// Model.
    pub model: Model,
    /// Answer size in bytes.
    pub answer_bytes: u64,
}

impl NetworkSpec {
    /// Connection end with these values.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn end(&self) -> Result<End> {
        let spin = Duration::from_micros(self.spin_us);
        let (slots, checksum, max_slot_bytes) = (self.slots, self.checksum, self.max_slot_bytes);
        let mut end = End { slots, checksum, spin, max_slot_bytes, ..End::default() };
        end.numa_node = self.numa_node;
        if let Some(name) = &self.provider {
            end.providers = End::providers_named(name)?;
        }
        Ok(end)
    }

    /// Node selection.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn policy(&self) -> Result<Policy> {
        match self.policy.as_str() {
            "round-robin" => Ok(Policy::RoundRobin),
            "least-in-flight" => Ok(Policy::LeastInFlight),
            "latency-aware" => Ok(Policy::LatencyAware),
            name => Err(Error::Invalid {
                what: "policy",
                value: format!("{name:?}"),
                expected: "round-robin, least-in-flight or latency-aware".into(),
            }),
        }
    }

    /// Time for a query.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn deadline(&self) -> Result<Duration> {
        let valid =
            Duration::try_from_secs_f64(self.deadline_s).ok().filter(|time| !time.is_zero());
        valid.ok_or_else(|| Error::Invalid {
            what: "deadline of a query, seconds",
            value: self.deadline_s.to_string(),
            expected: "more than 0".into(),
        })
    }
}

impl Spec {
    /// The description in JSON.
    ///
    /// # Errors
    /// [`Error::Json`].
    pub fn from_json(text: &str) -> Result<Spec> {
        serde_json::from_str(text).map_err(|source| Error::Json { what: "test", source })
    }

    /// LoadGen settings.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn loadgen_settings(&self, loadgen: &LoadGen) -> Result<Settings> {
        let mut to = loadgen.settings(scenario(&self.scenario)?, mode(&self.mode)?);
        let from = self.settings;
        if let Some(rate) = from.target_qps {
            if !rate.is_finite() || rate <= 0.0 {
                let (value, expected) = (rate.to_string(), "more than 0".into());
                return Err(Error::Invalid { what: "queries a second", value, expected });
            }
            to.server_target_qps = rate;
            to.offline_expected_qps = rate;
            to.single_stream_expected_latency_ns = 1e9 / rate;
            to.multi_stream_expected_latency_ns = 1e9 / rate;
        }
        if let Some(limit) = from.target_latency_ms {
            to.server_target_latency_ns = (limit * 1e6) as u64;
        }
        for (to, from) in [
            (&mut to.multi_stream_samples_per_query, from.samples_per_query),
            (&mut to.min_duration_ms, from.min_duration_ms),
            (&mut to.max_duration_ms, from.max_duration_ms),
            (&mut to.min_query_count, from.min_query_count),
            (&mut to.max_query_count, from.max_query_count),
        ] {
            *to = from.unwrap_or(*to);
        }
        to.server_coalesce_queries = i32::from(from.coalesce);
        Ok(to)
    }
}

fn scenario(name: &str) -> Result<Scenario> {
    let known = [
        ("SingleStream", Scenario::SingleStream),
        ("MultiStream", Scenario::MultiStream),
        ("Server", Scenario::Server),
        ("Offline", Scenario::Offline),
    ];
    named("scenario", name, &known)
}

fn mode(name: &str) -> Result<Mode> {
    let known = [
        ("performance", Mode::Performance),
        ("accuracy", Mode::Accuracy),
        ("submission", Mode::Submission),
    ];
    named("mode", name, &known)
}

fn named<T: Copy>(what: &'static str, name: &str, known: &[(&str, T)]) -> Result<T> {
    let found = known.iter().find(|(each, _)| *each == name).map(|(_, value)| *value);
    found.ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|(each, _)| *each).collect();
        Error::Invalid { what, value: format!("{name:?}"), expected: names.join(", ") }
    })
}

#[cfg(test)]
mod tests {
    use super::{NetworkSpec, mode, scenario};

    #[test]
    fn unknown_names_are_refused_with_the_known_ones() {
        assert_eq!(
            scenario("offline").unwrap_err().to_string(),
            "scenario \"offline\": expected SingleStream, MultiStream, Server, Offline"
        );
        assert!(mode("speed").is_err());
        let spec = NetworkSpec { policy: "random".into(), ..NetworkSpec::default() };
        assert!(spec.policy().is_err());
        let spec = NetworkSpec { provider: Some("copy".into()), ..NetworkSpec::default() };
        assert_eq!(
            spec.end().unwrap_err().to_string(),
            "provider \"copy\": expected shm, verbs, ofi or tcp"
        );
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let spec = NetworkSpec { deadline_s: seconds, ..NetworkSpec::default() };
            assert!(spec.deadline().is_err(), "{seconds}");
        }
        assert!(NetworkSpec::default().end().is_ok());
    }
}
