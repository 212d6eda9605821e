//! A round as a state machine on a world.

use serde_json::Value;
use weft_moe::SendPlan;

use super::paths::Paths;
use super::rank::{Progress, Rank};
use super::report::{Phase, Times};
use super::spec::MoeJob;
use super::tag::{KINDS, Kind, read_tag, tag};
use super::traffic::{Traffic, Weights};
use crate::error::Error;
use crate::spec::Cluster;
use crate::trace::Span;
use crate::workload::Workload;
use crate::world::World;

/// The ranks of an all-to-all, all their rounds.
pub struct MoeWorkload {
    pub(super) job: MoeJob,
    pub(super) weights: Weights,
    pub(super) traffic: Vec<Traffic>,
    ranks: Vec<Rank>,
    paths: Paths,
    times: Times,
    /// Events so far, and about how many there will be.
    events: u64,
    expected: u64,
    /// Ranks that have not ended: the round, if all wait for each other, or else the last one.
    left: u32,
    finished: Option<f64>,
}

impl MoeWorkload {
    /// Plans all rounds, finds all paths. `first_private` is the number of the first of the world's
    /// private links that are this workload's.
    pub fn new(
        world: &mut World,
        job: &MoeJob,
        cluster: &Cluster,
        first_private: u32,
    ) -> Result<MoeWorkload, Error> {
        job.check()?;
        job.fits(world.network())?;
        let mut weights = Weights::new(job)?;
        let (seed, mut planner) = (cluster.seed, SendPlan::new(&job.shape(0)?));
        let traffic: Result<_, _> = (0..job.rounds)
            .map(|round| Traffic::plan(job, seed, &mut planner, round, &mut weights.load))
            .collect();
        let mut ranks = vec![Rank { slow: 1.0, ..Rank::default() }; job.ranks as usize];
        for straggler in &cluster.stragglers {
            // A straggler of another job's ranks is none of ours.
            if let Some(rank) = ranks.get_mut(straggler.rank as usize) {
                (rank.slow, rank.late_s) = (straggler.slow, straggler.late_s);
            }
        }
        let mut workload = MoeWorkload {
            weights,
            traffic: traffic?,
            ranks,
            paths: Paths::find(world, job, first_private)?,
            times: Times::default(),
            events: 0,
            expected: 0,
            left: job.ranks,
            finished: None,
            job: job.clone(),
        };
        workload.expected = workload.count_events();
        Ok(workload)
    }

    fn count_events(&self) -> u64 {
        let of_rank = |rank: u32, round: u32| {
            // One for each stage of a rank, and what it receives.
            let arrivals = self.expected_rows(rank, round) + self.expected_answers(rank, round);
            u64::from(arrivals + self.job.ranks - 1) + KINDS.len() as u64 - 3
        };
        let rounds = 0..self.job.rounds;
        rounds.map(|round| (0..self.job.ranks).map(|rank| of_rank(rank, round)).sum::<u64>()).sum()
    }

    /// What the rounds came to.
    pub fn report(&self) -> Value {
        self.times.report(&self.job, &self.weights, &self.traffic)
    }

    pub(super) fn progress_of(&mut self, rank: u32, round: u32) -> &mut Progress {
        &mut self.ranks[rank as usize].progress[(round % 2) as usize]
    }

    /// The other ranks, beginning behind this one, so that not all write to one first.
    pub(super) fn peers(&self, rank: u32) -> impl Iterator<Item = u32> + use<> {
        let ranks = self.job.ranks;
        (1..ranks).map(move |step| (rank + step) % ranks)
    }

    /// How many parts a write of rows from `source` to `destination` has.
    fn parts(&self, source: u32, destination: u32) -> u32 {
        if self.job.same_domain(source, destination) { 1 } else { self.job.nics_per_rank }
    }

    /// The parts of rows that a rank receives in a round.
    pub(super) fn expected_rows(&self, rank: u32, round: u32) -> u32 {
        let writes = |peer: u32| match self.traffic[round as usize].rows(peer, rank) {
            0 => 0,
            rows => u32::from(self.private(rows) > 0) + u32::from(rows > self.private(rows)),
        };
        self.peers(rank).map(|peer| writes(peer) * self.parts(peer, rank)).sum()
    }

    pub(super) fn expected_answers(&self, rank: u32, round: u32) -> u32 {
        let some = |peer: &u32| self.traffic[round as usize].rows(rank, *peer) > 0;
        self.peers(rank).filter(some).map(|peer| self.parts(peer, rank)).sum()
    }

    pub(super) fn private(&self, rows: u32) -> u32 {
        rows.min(self.weights.private_rows)
    }

    /// Writes `bytes` to a peer: at once over NVLink, and else once the NIC has posted it.
    pub(super) fn write(
        &mut self,
        world: &mut World,
        kind: Kind,
        round: u32,
        (from, to): (u32, u32),
        bytes: u64,
    ) -> Result<(), Error> {
        let (paths, tag) = (self.paths.between(from, to), tag(kind, round, from, to));
        if self.job.same_domain(from, to) {
            let path = paths[usize::from(kind == Kind::Answers)];
            return world.start_flow(path, bytes, path.latency_s, tag);
        }
        let now = world.now();
        let post_s = world.constants().post_s * self.ranks[from as usize].slow;
        let posted = world.post(self.job.endpoint(from, 0), now, post_s);
        // A header is short: one part, on the first NIC.
        let parts = if kind == Kind::Header { 1 } else { u64::from(self.job.nics_per_rank) };
        for part in 0..parts {
            let path = paths[part as usize];
            let bytes = bytes * (part + 1) / parts - bytes * part / parts;
            world.start_flow(path, bytes, posted - now + path.latency_s, tag)?;
        }
        Ok(())
    }

    pub(super) fn after(
        &self,
        world: &mut World,
        rank: u32,
        round: u32,
        kind: Kind,
        seconds: f64,
    ) -> Result<(), Error> {
        let slow = self.ranks[rank as usize].slow;
        world.timer(seconds * slow, tag(kind, round, rank, rank))
    }

    /// A phase of this rank has ended now.
    fn note(&mut self, world: &mut World, rank: u32, round: u32, phase: Phase) {
        let (begin_s, end_s) = (self.ranks[rank as usize].begun_s, world.now());
        self.times.add(phase, end_s - begin_s);
        if world.traced() {
            let rows = &self.traffic[round as usize];
            let bytes = match phase {
                Phase::Dispatch => rows.received(rank) * self.weights.row_bytes,
                Phase::Combine => rows.sent(rank) * self.weights.answer_bytes,
            };
            let name = format!("{} {round}", phase.name());
            let row = "phases";
            world.span(Span { job: 0, rank, row, name, begin_s, end_s, bytes });
        }
    }

    fn combined(&mut self, world: &mut World, rank: u32, round: u32) -> Result<(), Error> {
        self.note(world, rank, round, Phase::Combine);
        *self.progress_of(rank, round) = Progress::default();
        self.ranks[rank as usize].rounds_done = round + 1;
        let last = round + 1 == self.job.rounds;
        if !last && !self.job.barrier {
            return self.begin(world, rank, round + 1);
        }
        self.left -= 1;
        if self.left > 0 {
            return Ok(());
        }
        if last {
            self.finished = Some(world.now());
            return Ok(());
        }
        self.left = self.job.ranks;
        (0..self.job.ranks).try_for_each(|rank| self.begin(world, rank, round + 1))
    }

    fn begin(&mut self, world: &mut World, rank: u32, round: u32) -> Result<(), Error> {
        self.ranks[rank as usize].begun_s = world.now();
        let start_s = world.constants().launch_s + self.job.costs.dispatch_start_s;
        self.after(world, rank, round, Kind::Planned, start_s)
    }
}

impl Workload for MoeWorkload {
    fn start(&mut self, world: &mut World) -> Result<(), Error> {
        for rank in 0..self.job.ranks {
            let late_s = self.ranks[rank as usize].late_s;
            world.timer(late_s, tag(Kind::Begin, 0, rank, rank))?;
        }
        Ok(())
    }

    fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error> {
        self.events += 1;
        let (kind, round, from, rank) = read_tag(tag);
        match kind {
            Kind::Begin => self.begin(world, rank, round),
            Kind::Planned => self.planned(world, rank, round),
            Kind::Packed => self.send_private(world, rank, round),
            Kind::Routed => {
                self.progress_of(rank, round).routed = true;
                self.send_remainder(world, rank, round)
            }
            Kind::Dispatched => {
                self.note(world, rank, round, Phase::Dispatch);
                let experts_s = self.job.costs.experts_s;
                self.after(world, rank, round, Kind::Combine, experts_s)
            }
            Kind::Combine => {
                self.ranks[rank as usize].begun_s = world.now();
                let bytes = self.traffic[round as usize].received(rank) * self.weights.answer_bytes;
                let pack_s = world.constants().copy_s(bytes);
                let start_s = world.constants().launch_s + self.job.costs.combine_start_s;
                self.after(world, rank, round, Kind::Answered, start_s + pack_s)
            }
            Kind::Answered => self.send_answers(world, rank, round),
            Kind::Combined => self.combined(world, rank, round),
            Kind::Header => self.header_arrived(world, rank, round, 1),
            Kind::Rows => {
                debug_assert_ne!(from, rank, "a rank's own rows take no wire");
                self.progress_of(rank, round).rows += 1;
                self.end_dispatch(world, rank, round)
            }
            Kind::Answers => {
                self.progress_of(rank, round).answers += 1;
                self.end_combine(world, rank, round)
            }
        }
    }

    fn finished(&self) -> Option<f64> {
        self.finished
    }

    fn stuck(&self) -> Error {
        let last = self.ranks.iter().enumerate().min_by_key(|(_, rank)| rank.rounds_done);
        let (rank, round) = last.map_or((0, 0), |(rank, state)| (rank as u32, state.rounds_done));
        Error::Waiting { what: "the all-to-all", rank, round }
    }

    fn describe(&self, tag: u64) -> String {
        let (kind, round, from, to) = read_tag(tag);
        let what = match kind {
            Kind::Header => "header",
            Kind::Rows => "rows",
            Kind::Answers => "answers",
            _ => "work",
        };
        format!("the {what} of rank {from} for rank {to} in round {round}")
    }

    fn progress(&self) -> f64 {
        (self.events as f64 / self.expected.max(1) as f64).min(1.0)
    }
}
