//! Collectives: counted-write schedules on the network.
//!
//! - `execution`: a cursor for each rank over the operations
//! - `connections`: writes in flight and queued, by rank pair
//! - `rank`, `vectors`, `sizes`: rank state, vector segments, span bytes
//! - `placement`, `program`: rank placement, schedules from JSON
//! - `diagnostics`: progress, flow names, deadlocks

mod connections;
mod diagnostics;
mod execution;
mod placement;
mod program;
mod rank;
mod sizes;
mod vectors;

use serde::{Deserialize, Serialize};
use serde_json::json;
use weft_collectives::{
    Algorithm, AnySchedule, Collective, Options, Program, Rank, Schedule, build,
};

use crate::check::from_1_to;
use crate::cluster::{Cluster, Straggler};
use crate::cpu::CpuTime;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::progress::Progress;
use crate::workload::Workload;
use crate::world::World;

pub(crate) use execution::{Execution, ExecutionConfig};
/// Rank placement.
pub use placement::Placement;

/// One collective on a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveScenario {
    /// Network with its conditions.
    pub cluster: Cluster,
    /// Workload.
    pub job: CollectiveJob,
    /// Number of reported links, busiest first.
    #[serde(default = "crate::outcome::default_links")]
    pub links: usize,
    /// Maximum spans in the trace; 0 for no trace.
    #[serde(default)]
    pub trace: usize,
}

/// Collective, without a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveJob {
    /// `all-reduce`, `reduce-scatter`, `all-gather`, `broadcast` or `all-to-all`.
    #[serde(default = "default_collective")]
    pub collective: String,
    /// `ring`, `tree`, `hd`, `hdrm`, ...; for a program, the algorithm whose placement it takes.
    #[serde(default = "default_algorithm")]
    pub algorithm: String,
    /// Schedule as JSON, in place of an algorithm's.
    #[serde(default)]
    pub program: Option<serde_json::Value>,
    /// Vector length in bytes.
    pub bytes: u64,
    /// Rank count; default: all endpoints.
    #[serde(default)]
    pub ranks: Option<u32>,
    /// Rank placement.
    #[serde(default)]
    pub placement: Placement,
    /// Chunks for pipelined algorithms.
    #[serde(default)]
    pub chunks: Option<u32>,
    /// Ranks per node, for hierarchical algorithms.
    #[serde(default)]
    pub local: Option<u32>,
    /// Consecutive runs.
    #[serde(default = "default_rounds")]
    pub rounds: u32,
}

/// Maximum operations in a schedule as JSON.
const MOST_OPERATIONS: u64 = 1 << 20;

/// Schedule for the job `json` with all operations, as JSON: a valid `job.program`.
///
/// # Errors
/// Malformed JSON, no rank count, an unknown algorithm, or more than 1,048,576 operations.
pub fn schedule(json: &str) -> Result<String, Error> {
    let job: CollectiveJob = serde_json::from_str(json)?;
    let ranks = job.ranks.ok_or_else(|| Error::field("job.ranks", "unset", "a number of ranks"))?;
    let schedule = job.schedule(ranks)?;
    let operations: u64 = (0..ranks).map(|rank| u64::from(schedule.len(Rank(rank)))).sum();
    if operations > MOST_OPERATIONS {
        let must = format!("a schedule of at most {MOST_OPERATIONS} operations");
        return Err(Error::field("job.ranks", format!("{ranks} ({operations} operations)"), must));
    }
    Ok(serde_json::to_string(&Program::new(&schedule))?)
}

/// Maximum round count.
const MOST_ROUNDS: u32 = 1 << 20;

fn default_rounds() -> u32 {
    1
}

fn default_algorithm() -> String {
    "ring".into()
}

fn default_collective() -> String {
    "all-reduce".into()
}

impl CollectiveJob {
    /// Parsed algorithm.
    pub fn algorithm(&self) -> Result<Algorithm, Error> {
        Ok(self.algorithm.parse()?)
    }

    /// Rank count: from the job or its program, or all endpoints.
    pub fn ranks(&self, world: &World) -> Result<u32, Error> {
        match &self.program {
            Some(value) => Ok(program::program(value, self.ranks)?.ranks()),
            None => Ok(self.ranks.unwrap_or(world.network().endpoints())),
        }
    }

    /// Schedule for `ranks` ranks.
    pub fn schedule(&self, ranks: u32) -> Result<AnySchedule, Error> {
        if let Some(value) = &self.program {
            return Ok(program::program(value, Some(ranks))?.into());
        }
        let collective = match self.collective.as_str() {
            "all-reduce" => Collective::AllReduce,
            "reduce-scatter" => Collective::ReduceScatter,
            "all-gather" => Collective::AllGather,
            "broadcast" => Collective::Broadcast { root: Rank(0) },
            "all-to-all" => Collective::AllToAll,
            other => {
                let must = "all-reduce, reduce-scatter, all-gather, broadcast or all-to-all";
                return Err(Error::field("collective", other, must));
            }
        };
        let default = Options::default();
        let options = Options {
            chunks: self.chunks.unwrap_or(default.chunks),
            local: self.local.unwrap_or(default.local),
        };
        Ok(build(collective, self.algorithm()?, ranks, &options)?)
    }
}

/// Collective workload.
pub struct CollectiveWorkload<S> {
    execution: Execution<S>,
    stragglers: Vec<Straggler>,
    rounds: u32,
}

impl CollectiveWorkload<AnySchedule> {
    /// Workload for `job` on a world.
    pub fn new(
        world: &mut World,
        job: &CollectiveJob,
        stragglers: &[Straggler],
        group: u64,
    ) -> Result<CollectiveWorkload<AnySchedule>, Error> {
        from_1_to(MOST_ROUNDS.into(), "job.rounds", job.rounds)?;
        let ranks = job.ranks(world)?;
        let endpoints = job.placement.endpoints(world, job.algorithm()?, ranks)?;
        let schedule = job.schedule(ranks)?;
        CollectiveWorkload::of(world, schedule, endpoints, job.bytes, job.rounds, stragglers, group)
    }
}

impl<S: Schedule> CollectiveWorkload<S> {
    /// Workload for a schedule on a world.
    pub fn of(
        world: &mut World,
        schedule: S,
        endpoints: Vec<weft_topology::EndpointId>,
        bytes: u64,
        rounds: u32,
        stragglers: &[Straggler],
        group: u64,
    ) -> Result<CollectiveWorkload<S>, Error> {
        let lengths = vec![bytes; rounds as usize];
        let setup = ExecutionConfig {
            endpoints,
            lengths: &lengths,
            stragglers,
            group,
            base: 0,
            first: true,
        };
        let execution = Execution::new(world, schedule, setup)?;
        Ok(CollectiveWorkload { execution, stragglers: stragglers.to_vec(), rounds })
    }
}

impl<S: Schedule> Workload for CollectiveWorkload<S> {
    fn start(&mut self, world: &mut World) -> Result<(), Error> {
        let ranks = self.execution.schedule().ranks();
        let mut late_s = vec![0.0; ranks as usize];
        for straggler in &self.stragglers {
            if let Some(late) = late_s.get_mut(straggler.rank as usize) {
                *late = straggler.late_s;
            }
        }
        for rank in 0..ranks {
            for _ in 0..self.rounds {
                self.execution.release(world, rank, late_s[rank as usize])?;
            }
        }
        Ok(())
    }

    fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error> {
        self.execution.event(world, tag)?;
        self.execution.completed().clear();
        Ok(())
    }

    fn finished(&self) -> Option<f64> {
        self.execution.finished()
    }

    fn deadlock(&self) -> Error {
        self.execution.deadlock()
    }

    fn flow_name(&self, tag: u64) -> String {
        self.execution.flow_name(tag)
    }

    fn progress(&self) -> f64 {
        self.execution.progress()
    }
}

/// Runs one collective.
pub(crate) fn run(
    spec: &CollectiveScenario,
    progress: &mut Progress<'_>,
) -> Result<Outcome, Error> {
    let cpu = CpuTime::start();
    let mut world = World::new(&spec.cluster)?;
    if spec.trace > 0 {
        world.record(spec.trace);
    }
    spec.cluster.check(spec.job.ranks(&world)?)?;
    let stragglers = &spec.cluster.stragglers;
    let mut workload = CollectiveWorkload::new(&mut world, &spec.job, stragglers, 0)?;
    let schedule = workload.execution.schedule();
    let (ranks, steps) = (schedule.ranks(), schedule.steps());
    let name = schedule.name().to_string();
    let time_s = world.run(&mut [&mut workload], progress)?;
    let mut outcome = world.outcome(time_s, cpu, spec.links);
    let bandwidth = spec.job.bytes as f64 * f64::from(spec.job.rounds) / time_s;
    outcome.results = json!({
        "ranks": ranks,
        "steps": steps,
        "bytes": spec.job.bytes,
        "algorithm": name,
        "collective": spec.job.collective,
        "algorithm_bandwidth_gbps": bandwidth * 8e-9,
    });
    Ok(outcome)
}
