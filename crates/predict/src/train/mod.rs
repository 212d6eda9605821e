//! Training iterations: compute, and gradients that are added up while it goes on.

mod model;
mod training;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::check::from_1_to;
use crate::collective::CollectiveJob;
use crate::cpu::CpuTime;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::run::Progress;
use crate::spec::{Cluster, Straggler};
use crate::world::World;

/// Models as layers.
pub use model::{Exchange, Layer, Model};
pub(crate) use training::{Plan, Training};

/// Training on a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainSpec {
    /// On what.
    pub cluster: Cluster,
    /// What is trained, and how its gradients are added up.
    pub job: TrainJob,
    /// How many links to report, the busiest first.
    #[serde(default = "crate::spec::links")]
    pub links: usize,
    /// Record up to so many spans for a trace.
    #[serde(default)]
    pub trace: usize,
}

/// What is trained, wherever it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainJob {
    /// The model.
    pub model: Model,
    /// How gradients are added up; its `bytes` and `rounds` are not used.
    pub reduction: CollectiveJob,
    /// A bucket of gradients leaves when it has this many bytes.
    #[serde(default = "default_bucket")]
    pub bucket_bytes: u64,
    /// Buckets leave while the backward pass goes on.
    #[serde(default = "default_overlap")]
    pub overlap: bool,
    /// How many iterations.
    #[serde(default = "default_iterations")]
    pub iterations: u32,
}

/// The most iterations.
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
    /// Makes it ready to run on a world.
    pub(crate) fn workload(
        &self,
        world: &mut World,
        stragglers: &[Straggler],
        group: u64,
    ) -> Result<Training, Error> {
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
            // All kinds run between the same ranks: they are where the reduction wants them.
            let algorithm = self.reduction.algorithm()?;
            endpoints.push(self.reduction.placement.endpoints(world, algorithm, ranks)?);
        }
        let iterations = self.iterations;
        let plan = Plan { program, schedules, endpoints, iterations, stragglers, group };
        Training::new(world, plan)
    }
}

/// Trains.
pub(crate) fn run(spec: &TrainSpec, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
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

/// What training came to, by iteration.
pub(crate) fn report(job: &TrainJob, training: &Training, ranks: u32) -> serde_json::Value {
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

/// How long the last iteration took, and how long an iteration's collectives ran at a rank, in the mean.
pub(crate) fn communication_s(training: &Training) -> (f64, f64) {
    // The last iteration has no start-up in it; the first one may.
    let last_s = match training.ends_s() {
        [.., before, last] => last - before,
        [only] => *only,
        [] => 0.0,
    };
    (last_s, training.communication_s().0)
}
