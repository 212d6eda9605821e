//! Training iterations: compute, overlapped with gradient all-reduces.

mod model;
mod training;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::check::from_1_to;
use crate::cluster::{Cluster, Straggler};
use crate::collective::CollectiveJob;
use crate::cpu::CpuTime;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::progress::Progress;
use crate::world::World;

/// Models as layers.
pub use model::{Exchange, Layer, Model};
pub(crate) use training::{TrainingConfig, TrainingWorkload};

/// Training on a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainScenario {
    /// Network with its conditions.
    pub cluster: Cluster,
    /// Model and gradient reduction.
    pub job: TrainJob,
    /// Number of reported links, busiest first.
    #[serde(default = "crate::outcome::default_links")]
    pub links: usize,
    /// Maximum spans in the trace; 0 for no trace.
    #[serde(default)]
    pub trace: usize,
}

/// Training job, without a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainJob {
    /// Model.
    pub model: Model,
    /// Gradient collective; its `bytes` and `rounds` are ignored.
    pub reduction: CollectiveJob,
    /// Bucket size: a bucket is reduced once it has this many bytes.
    #[serde(default = "default_bucket")]
    pub bucket_bytes: u64,
    /// True if buckets are reduced during the backward pass, rather than after it.
    #[serde(default = "default_overlap")]
    pub overlap: bool,
    /// Iteration count.
    #[serde(default = "default_iterations")]
    pub iterations: u32,
}

/// Maximum iteration count.
const MOST_ITERATIONS: u32 = 1 << 16;

fn default_bucket() -> u64 {
    25 << 20
}

fn default_overlap() -> bool {
    true
}

fn default_iterations() -> u32 {
    3
}

impl TrainJob {
    /// The job's workload on a world.
    pub(crate) fn workload(
        &self,
        world: &mut World,
        stragglers: &[Straggler],
        group: u64,
    ) -> Result<TrainingWorkload, Error> {
        self.model.check()?;
        from_1_to(MOST_ITERATIONS.into(), "job.iterations", self.iterations)?;
        let program = self.model.iteration(&self.reduction, self.bucket_bytes, self.overlap);
        let ranks = self.reduction.ranks.unwrap_or(world.network().endpoints());
        let mut schedules = Vec::new();
        let mut endpoints = Vec::new();
        for (collective, algorithm) in &program.kinds {
            let collective = collective.clone();
            let algorithm = algorithm.clone();
            let job = CollectiveJob { collective, algorithm, ..self.reduction.clone() };
            schedules.push(job.schedule(ranks)?);
            // All collectives run between the same ranks, at the reduction's placement.
            let algorithm = self.reduction.algorithm()?;
            endpoints.push(self.reduction.placement.endpoints(world, algorithm, ranks)?);
        }
        let iterations = self.iterations;
        let plan = TrainingConfig { program, schedules, endpoints, iterations, stragglers, group };
        TrainingWorkload::new(world, plan)
    }
}

/// Runs the scenario on the cluster that it names.
pub(crate) fn run(spec: &TrainScenario, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
    let cpu = CpuTime::start();
    let mut world = World::new(&spec.cluster)?;
    if spec.trace > 0 {
        world.record(spec.trace);
    }
    let job = &spec.job;
    let ranks = job.reduction.ranks.unwrap_or(world.network().endpoints());
    spec.cluster.check(ranks)?;
    let mut training = job.workload(&mut world, &spec.cluster.stragglers, 0)?;
    let time_s = world.run(&mut [&mut training], progress)?;
    let mut outcome = world.outcome(time_s, cpu, spec.links);
    outcome.results = report(job, &training, ranks);
    Ok(outcome)
}

/// Results by iteration.
pub(crate) fn report(job: &TrainJob, training: &TrainingWorkload, ranks: u32) -> serde_json::Value {
    let (iteration_s, communication_s) = communication_s(training);
    let (_, exposed_s) = training.communication_s();
    json!({
        "model": job.model.name,
        "algorithm": job.reduction.algorithm,
        "ranks": ranks,
        "gradient_bytes": job.model.gradient_bytes(),
        "iterations": job.iterations,
        "iteration_s": iteration_s,
        "compute_s": job.model.compute_s(),
        "communication_s": communication_s,
        "exposed_communication_s": exposed_s,
    })
}

/// Time of the last iteration, and mean communication time per iteration at a rank.
pub(crate) fn communication_s(training: &TrainingWorkload) -> (f64, f64) {
    // The first iteration may include start-up; the last one does not.
    let last_s = match training.ends_s() {
        [.., before, last] => last - before,
        [only] => *only,
        [] => 0.0,
    };
    (last_s, training.communication_s().0)
}
