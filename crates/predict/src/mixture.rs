//! Several jobs on one network, which compete for its links.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use weft_netsim::Link;

use crate::collective::{CollectiveJob, CollectiveWorkload};
use crate::cpu::CpuTime;
use crate::dlrm::{DlrmJob, DlrmWorkload};
use crate::error::Error;
use crate::moe::{MoeJob, MoeWorkload};
use crate::outcome::Outcome;
use crate::query::{QueryJob, QueryWorkload};
use crate::run::Progress;
use crate::spec::Cluster;
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
    #[serde(default = "crate::spec::links")]
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
    /// Mixture-of-experts dispatch and combine.
    Moe(MoeJob),
    /// A recommendation model, fused.
    Dlrm(DlrmJob),
    /// Queries and answers.
    Query(QueryJob),
}

impl Job {
    fn ranks(&self) -> Option<u32> {
        match self {
            Job::Collective(job) => job.ranks,
            Job::Train(job) => job.reduction.ranks,
            Job::Moe(job) => Some(job.ranks),
            Job::Dlrm(job) => Some(job.ranks),
            Job::Query(job) => job.front_ends.checked_add(job.accelerators),
        }
    }

    /// Links of its own that it needs beside the network.
    fn private_links(&self) -> Vec<Link> {
        match self {
            Job::Moe(job) => job.private_links(),
            _ => Vec::new(),
        }
    }

    /// Makes it ready to run; `first_private` is the first of its links among the private ones.
    fn workload(
        &self,
        world: &mut World,
        cluster: &Cluster,
        first_private: u32,
        group: u64,
    ) -> Result<Box<dyn Workload>, Error> {
        let stragglers = cluster.stragglers.as_slice();
        Ok(match self {
            Job::Collective(job) => {
                Box::new(CollectiveWorkload::new(world, job, stragglers, group)?)
            }
            Job::Train(job) => Box::new(job.workload(world, stragglers, group)?),
            Job::Moe(job) => Box::new(MoeWorkload::new(world, job, cluster, first_private)?),
            Job::Dlrm(job) => Box::new(DlrmWorkload::new(world, job, cluster, true)?),
            Job::Query(job) => Box::new(QueryWorkload::new(world, job)?),
        })
    }
}

/// Runs jobs together.
pub(crate) fn run(spec: &MixtureSpec, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
    let cpu = CpuTime::start();
    let Some(first) = spec.jobs.first() else {
        return Err(Error::field("jobs", "an empty list", "at least one job"));
    };
    for job in &spec.jobs {
        // Its links are counted by what it says of itself.
        if let Job::Moe(job) = job {
            job.check()?;
        }
    }
    let private: Vec<Vec<Link>> = spec.jobs.iter().map(Job::private_links).collect();
    let mut world = World::with_domains(&spec.cluster, &private.concat())?;
    if spec.trace > 0 {
        world.record(spec.trace);
    }
    spec.cluster.check(first.ranks().unwrap_or(world.network().endpoints()))?;
    let mut workloads = Vec::new();
    let calm = Cluster { stragglers: Vec::new(), ..spec.cluster.clone() };
    let mut first_private = 0;
    for (number, job) in spec.jobs.iter().enumerate() {
        let cluster = if number == 0 { &spec.cluster } else { &calm };
        workloads.push(job.workload(&mut world, cluster, first_private, number as u64)?);
        first_private += private[number].len() as u32;
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
