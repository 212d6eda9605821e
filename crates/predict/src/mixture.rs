//! Workload mixture: concurrent jobs that share the links and NICs in one network.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use weft_netsim::Link;

use crate::cluster::Cluster;
use crate::collective::{CollectiveJob, CollectiveWorkload};
use crate::cpu::CpuTime;
use crate::dlrm::{DlrmJob, DlrmWorkload};
use crate::error::Error;
use crate::moe::{MoeJob, MoeWorkload};
use crate::outcome::Outcome;
use crate::progress::Progress;
use crate::query::{QueryJob, QueryWorkload};
use crate::train::TrainJob;
use crate::workload::Workload;
use crate::world::World;

/// Concurrent jobs on a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixtureScenario {
    /// Network with its conditions; stragglers are ranks in the first job.
    pub cluster: Cluster,
    /// Jobs.
    pub jobs: Vec<MixtureJob>,
    /// Number of reported links, busiest first.
    #[serde(default = "crate::outcome::default_links")]
    pub links: usize,
    /// Maximum spans in the trace; 0 for no trace.
    #[serde(default)]
    pub trace: usize,
}

/// Job in a mixture.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MixtureJob {
    /// Collective rounds.
    Collective(CollectiveJob),
    /// Training iterations.
    Train(TrainJob),
    /// Mixture-of-experts dispatch and combine.
    Moe(MoeJob),
    /// Recommendation model iteration, fused.
    Dlrm(DlrmJob),
    /// Queries and responses.
    Query(QueryJob),
}

impl MixtureJob {
    fn ranks(&self) -> Option<u32> {
        match self {
            MixtureJob::Collective(job) => job.ranks,
            MixtureJob::Train(job) => job.reduction.ranks,
            MixtureJob::Moe(job) => Some(job.ranks),
            MixtureJob::Dlrm(job) => Some(job.ranks),
            MixtureJob::Query(job) => job.front_ends.checked_add(job.accelerators),
        }
    }

    /// The job's links beside the network's.
    fn private_links(&self) -> Vec<Link> {
        match self {
            MixtureJob::Moe(job) => job.private_links(),
            _ => Vec::new(),
        }
    }

    /// The job's workload; `first_private` is the index of the job's first private link.
    fn workload(
        &self,
        world: &mut World,
        cluster: &Cluster,
        first_private: u32,
        group: u64,
        progress: &mut Progress<'_>,
    ) -> Result<Box<dyn Workload>, Error> {
        let stragglers = cluster.stragglers.as_slice();
        Ok(match self {
            MixtureJob::Collective(job) => {
                Box::new(CollectiveWorkload::new(world, job, stragglers, group)?)
            }
            MixtureJob::Train(job) => Box::new(job.workload(world, stragglers, group)?),
            MixtureJob::Moe(job) => {
                Box::new(MoeWorkload::new(world, job, cluster, first_private, progress)?)
            }
            MixtureJob::Dlrm(job) => Box::new(DlrmWorkload::new(world, job, cluster, true)?),
            MixtureJob::Query(job) => Box::new(QueryWorkload::new(world, job)?),
        })
    }
}

/// Runs the jobs at the same time.
pub(crate) fn run(spec: &MixtureScenario, progress: &mut Progress<'_>) -> Result<Outcome, Error> {
    let cpu = CpuTime::start();
    let Some(first) = spec.jobs.first() else {
        return Err(Error::field("jobs", "an empty list", "at least one job"));
    };
    for job in &spec.jobs {
        // Checked before the private links are counted.
        if let MixtureJob::Moe(job) = job {
            job.check()?;
        }
    }
    let private: Vec<Vec<Link>> = spec.jobs.iter().map(MixtureJob::private_links).collect();
    let mut world = World::with_domains(&spec.cluster, &private.concat())?;
    if spec.trace > 0 {
        world.record(spec.trace);
    }
    spec.cluster.check(first.ranks().unwrap_or(world.network().endpoints()))?;
    let mut workloads = Vec::new();
    let without_stragglers = Cluster { stragglers: Vec::new(), ..spec.cluster.clone() };
    let mut first_private = 0;
    for (number, job) in spec.jobs.iter().enumerate() {
        let cluster = if number == 0 { &spec.cluster } else { &without_stragglers };
        workloads.push(job.workload(
            &mut world,
            cluster,
            first_private,
            number as u64,
            progress,
        )?);
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
