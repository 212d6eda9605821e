//! A test run by LoadGen.

use crate::counts::{Counts, Departure, Snapshot};
use crate::error::Result;
use crate::in_process::InProcess;
use crate::network::connect;
use crate::samples::Samples;
use crate::spec::Spec;
use crate::system::{NetworkSamples, NetworkSystem, SystemConfig};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use weft_dispatch::LedgerConfig;
use weft_loadgen::{Error as LoadGenError, LoadGen, SampleLibrary, SystemUnderTest, Test};

/// Test outcome.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// LoadGen summary lines, for example `"Result is"` with `"VALID"`; empty after an accuracy test.
    pub summary: BTreeMap<String, String>,
    /// True if LoadGen found the result valid; `None` after an accuracy test.
    pub is_valid: Option<bool>,
    /// Maximum answer size in bytes.
    pub answer_bytes: u64,
    /// LoadGen version.
    pub loadgen: String,
    /// Queries.
    pub counts: Snapshot,
    /// Nodes that left or were lost during the test.
    pub departures: Vec<Departure>,
}

impl Outcome {
    /// As JSON.
    pub fn to_json(&self) -> String {
        // Maps with strings and numbers have no value that JSON lacks.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Runs a test. `counts` show the progress.
///
/// # Errors
/// Errors in the description, connections, samples and LoadGen. A query without an answer is not an error: it is
/// counted ([`Snapshot::failed`]).
pub fn run(spec: &Spec, counts: &Arc<Counts>) -> Result<Outcome> {
    let deadline = spec.network.deadline()?;
    let policy = spec.network.policy()?;
    let end = spec.network.end()?;
    // SAFETY: the caller names the library that `weft.loadgen.built` compiled; the shim version is checked.
    let loadgen = unsafe { LoadGen::load(&spec.library) }?;
    let settings = spec.loadgen_settings(&loadgen)?;
    let test = Test {
        settings,
        model: spec.model.clone(),
        user_conf: spec.user_conf.clone(),
        audit_config: spec.audit_config.clone(),
        log_directory: spec.log_directory.clone(),
    };
    let from = &spec.samples;
    let samples_per_query = settings.multi_stream_samples_per_query as usize;
    let samples = Arc::new(Samples::new(
        from.total,
        from.performance,
        from.bytes,
        samples_per_query,
        from.file.as_deref(),
    )?);
    if spec.nodes.is_empty() {
        let (counts, local) = (counts.clone(), spec.in_process);
        let (model, bytes, slots) = (local.model, local.answer_bytes, spec.network.slots);
        let system = InProcess::new(loadgen, samples.clone(), model, bytes, slots, counts.clone())?;
        let found = outcome(&test, loadgen, &system, &*samples, &counts)?;
        return Ok(Outcome { answer_bytes: bytes, ..found });
    }
    let links = connect(&spec.nodes, &end)?;
    let ledger = LedgerConfig {
        queries: spec.network.queries,
        // A node has a place for each connection.
        nodes: links.len() as u32,
        slots: spec.network.slots,
        policy,
        ..LedgerConfig::default()
    };
    let kept_answers = spec.network.keep_answers;
    let config = SystemConfig { end, ledger, deadline, kept_answers };
    let system = NetworkSystem::new(loadgen, links, samples.clone(), counts.clone(), config)?;
    let answer_bytes = system.answer_bytes();
    let lent = NetworkSamples { system: &system, samples: &samples };
    let found = outcome(&test, loadgen, &system, &lent, counts);
    system.end()?;
    Ok(Outcome { answer_bytes, ..found? })
}

fn outcome(
    test: &Test,
    loadgen: LoadGen,
    system: &dyn SystemUnderTest,
    samples: &dyn SampleLibrary,
    counts: &Counts,
) -> Result<Outcome> {
    let (summary, is_valid) = match test.run(loadgen, system, samples) {
        Ok(summary) => (summary.values().clone(), Some(summary.is_valid())),
        // An accuracy test has no result.
        Err(LoadGenError::Summary { .. }) if has_accuracy_log(test) => (BTreeMap::new(), None),
        Err(error) => return Err(error.into()),
    };
    let (loadgen, departures) = (loadgen.version(), counts.departures());
    let counts = counts.snapshot();
    Ok(Outcome { summary, is_valid, answer_bytes: 0, loadgen, counts, departures })
}

/// True if the test has logged answers.
fn has_accuracy_log(test: &Test) -> bool {
    let path = test.log_directory.join("mlperf_log_accuracy.json");
    path.metadata().is_ok_and(|metadata| metadata.len() > 2)
}
