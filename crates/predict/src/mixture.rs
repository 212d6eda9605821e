//! Several jobs on one network, which compete for its links.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::collective::{CollectiveJob, CollectiveWorkload};
use crate::cpu::CpuTime;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::run::Progress;
use crate::spec::{Cluster, Straggler};
use crate::train::TrainJob;
use crate::workload::Workload;
use crate::world::World;

/// Jobs that run at the same time.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixtureSpec {
    /// On what. Its stragglers are of the first job.
    pub cluster: Cluster,
    /// What runs.
    pub jobs: Vec<Job>,
    /// How many links to report, the busiest first.
    #[serde(default = "default_links")]
    pub links: usize,
    /// Record up to so many spans for a trace.
    #[serde(default)]
    pub trace: usize,
}

/// A job of a mixture.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Job {
    /// A collective, some number of times.
    Collective(CollectiveJob),
    /// Training.
    Train(TrainJob),
}

fn default_links() -> usize {
    16
}

impl Job {
    fn ranks(&self) -> Option<u32> {
        match self {
            Job::Collective(job) => job.ranks,
            Job::Train(job) => job.reduction.ranks,
        }
    }

    fn workload(
        &self,
        world: &mut World,
        stragglers: &[Straggler],
        group: u64,
    ) -> Result<Box<dyn Workload>, Error> {
        Ok(match self {
            Job::Collective(job) => {
                Box::new(CollectiveWorkload::new(world, job, stragglers, group)?)
            }
            Job::Train(job) => Box::new(job.workload(world, stragglers, group)?),
        })
    }
}

/// Runs jobs together.
pub(crate) fn run(spec: &MixtureSpec, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
    let cpu = CpuTime::start();
    let Some(first) = spec.jobs.first() else {
        return Err(Error::field("jobs", "an empty list", "at least one job"));
    };
    let mut world = World::new(&spec.cluster)?;
    if spec.trace > 0 {
        world.record(spec.trace);
    }
    spec.cluster.check(first.ranks().unwrap_or(world.network().endpoints()))?;
    let mut workloads = Vec::new();
    for (number, job) in spec.jobs.iter().enumerate() {
        let stragglers = if number == 0 { spec.cluster.stragglers.as_slice() } else { &[] };
        workloads.push(job.workload(&mut world, stragglers, number as u64)?);
    }
    let mut borrowed: Vec<&mut dyn Workload> = Vec::new();
    for workload in &mut workloads {
        borrowed.push(workload.as_mut());
    }
    let time_s = world.run(&mut borrowed, progress)?;
    let ends: Vec<Value> =
        workloads.iter().map(|workload| json!({"time_s": workload.finished()})).collect();
    let mut outcome = world.outcome(time_s, cpu, spec.links);
    outcome.results = json!({"jobs": ends});
    Ok(outcome)
}
