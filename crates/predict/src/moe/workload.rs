//! Dispatch and combine workload: the round state machine.

use serde_json::Value;
use weft_moe::SendPlan;
use weft_moe::routing::Load;

use super::job::MoeJob;
use super::paths::PathTable;
use super::rank::{MoeRank, RoundProgress};
use super::report::{Phase, PhaseTimes};
use super::tag::{EVENTS, MoeEvent, read_tag, tag};
use super::traffic::{RowSizes, Traffic};
use crate::cluster::Cluster;
use crate::error::Error;
use crate::progress::Progress;
use crate::trace::Span;
use crate::workload::Workload;
use crate::world::World;

/// Rounds on all ranks.
pub struct MoeWorkload {
    pub(super) job: MoeJob,
    pub(super) sizes: RowSizes,
    pub(super) traffic: Vec<Traffic>,
    ranks: Vec<MoeRank>,
    paths: PathTable,
    times: PhaseTimes,
    /// Event count so far, and the expected count.
    events: u64,
    expected: u64,
    /// With a barrier, ranks that have not ended the current round; otherwise, the last round.
    left: u32,
    finished: Option<f64>,
}

/// Traffic in all rounds. The progress callback is asked before each rank's plan.
fn plan_rounds(
    job: &MoeJob,
    seed: u64,
    load: &mut Load,
    progress: &mut Progress<'_>,
) -> Result<Vec<Traffic>, Error> {
    let mut planner = SendPlan::new(&job.shape(0)?);
    (0..job.rounds)
        .map(|round| Traffic::plan(job, seed, &mut planner, round, load, progress))
        .collect()
}

impl MoeWorkload {
    /// Plans all rounds and routes all paths. `first_private` is the index of the job's first private link.
    pub fn new(
        world: &mut World,
        job: &MoeJob,
        cluster: &Cluster,
        first_private: u32,
        progress: &mut Progress<'_>,
    ) -> Result<MoeWorkload, Error> {
        job.check()?;
        let mut sizes = RowSizes::new(job)?;
        let traffic = plan_rounds(job, cluster.seed, &mut sizes.load, progress)?;
        let mut ranks = vec![MoeRank { slow: 1.0, ..MoeRank::default() }; job.ranks as usize];
        for straggler in &cluster.stragglers {
            // Stragglers beyond this job's ranks are ignored.
            if let Some(rank) = ranks.get_mut(straggler.rank as usize) {
                (rank.slow, rank.late_s) = (straggler.slow, straggler.late_s);
            }
        }
        let mut workload = MoeWorkload {
            sizes,
            traffic,
            ranks,
            paths: PathTable::find(world, job, first_private)?,
            times: PhaseTimes::default(),
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
            // One for each stage on a rank, and one for each arrival.
            let arrivals = self.expected_rows(rank, round) + self.expected_replies(rank, round);
            u64::from(arrivals + self.job.ranks - 1) + EVENTS.len() as u64 - 3
        };
        let rounds = 0..self.job.rounds;
        rounds.map(|round| (0..self.job.ranks).map(|rank| of_rank(rank, round)).sum::<u64>()).sum()
    }

    /// Round results.
    pub fn report(&self) -> Value {
        self.times.report(&self.job, &self.sizes, &self.traffic)
    }

    pub(super) fn progress_of(&mut self, rank: u32, round: u32) -> &mut RoundProgress {
        &mut self.ranks[rank as usize].progress[(round % 2) as usize]
    }

    /// Peers in rotated order, so that the ranks begin with different ones.
    pub(super) fn peers(&self, rank: u32) -> impl Iterator<Item = u32> + use<> {
        let ranks = self.job.ranks;
        (1..ranks).map(move |step| (rank + step) % ranks)
    }

    /// Number of parts in a row write from `source` to `destination`.
    fn parts(&self, source: u32, destination: u32) -> u32 {
        if self.job.same_domain(source, destination) { 1 } else { self.job.nics_per_rank }
    }

    /// Row parts that a rank receives in a round.
    pub(super) fn expected_rows(&self, rank: u32, round: u32) -> u32 {
        let writes = |peer: u32| match self.traffic[round as usize].rows(peer, rank) {
            0 => 0,
            rows => u32::from(self.private(rows) > 0) + u32::from(rows > self.private(rows)),
        };
        self.peers(rank).map(|peer| writes(peer) * self.parts(peer, rank)).sum()
    }

    pub(super) fn expected_replies(&self, rank: u32, round: u32) -> u32 {
        let some = |peer: &u32| self.traffic[round as usize].rows(rank, *peer) > 0;
        self.peers(rank).filter(some).map(|peer| self.parts(peer, rank)).sum()
    }

    pub(super) fn private(&self, rows: u32) -> u32 {
        rows.min(self.sizes.private_rows)
    }

    /// Writes `bytes` to a peer: at once over NVLink, else after the write and its rows are posted.
    pub(super) fn write(
        &mut self,
        world: &mut World,
        kind: MoeEvent,
        round: u32,
        (from, to): (u32, u32),
        bytes: u64,
    ) -> Result<(), Error> {
        let (paths, tag) = (self.paths.between(from, to), tag(kind, round, from, to));
        if self.job.same_domain(from, to) {
            let path = paths[usize::from(kind == MoeEvent::Replies)];
            return world.start_flow(path, bytes, path.latency_s, tag);
        }
        let now = world.now();
        let rows = if kind == MoeEvent::Rows { bytes / self.sizes.row_bytes } else { 0 };
        let post_s = world.constants().post_s + rows as f64 * self.job.costs.post_row_s;
        let slow = self.ranks[from as usize].slow;
        let posted = world.post(self.paths.first_nic(from), now, post_s * slow);
        // A header is one part, on the first NIC.
        let parts = if kind == MoeEvent::Header { 1 } else { u64::from(self.job.nics_per_rank) };
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
        kind: MoeEvent,
        seconds: f64,
    ) -> Result<(), Error> {
        let slow = self.ranks[rank as usize].slow;
        world.timer(seconds * slow, tag(kind, round, rank, rank))
    }

    /// Records that a phase has ended on a rank.
    fn note(&mut self, world: &mut World, rank: u32, round: u32, phase: Phase) {
        let (begin_s, end_s) = (self.ranks[rank as usize].begun_s, world.now());
        self.times.add(phase, end_s - begin_s);
        if world.traced() {
            let rows = &self.traffic[round as usize];
            let bytes = match phase {
                Phase::Dispatch => rows.received(rank) * self.sizes.row_bytes,
                Phase::Combine => rows.sent(rank) * self.sizes.answer_bytes,
            };
            let name = format!("{} {round}", phase.name());
            let row = "phases";
            world.span(Span { job: 0, rank, row, name, begin_s, end_s, bytes });
        }
    }

    fn combined(&mut self, world: &mut World, rank: u32, round: u32) -> Result<(), Error> {
        self.note(world, rank, round, Phase::Combine);
        *self.progress_of(rank, round) = RoundProgress::default();
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
        self.after(world, rank, round, MoeEvent::Planned, start_s)
    }
}

impl Workload for MoeWorkload {
    fn start(&mut self, world: &mut World) -> Result<(), Error> {
        for rank in 0..self.job.ranks {
            let late_s = self.ranks[rank as usize].late_s;
            world.timer(late_s, tag(MoeEvent::Begin, 0, rank, rank))?;
        }
        Ok(())
    }

    fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error> {
        self.events += 1;
        let (kind, round, from, rank) = read_tag(tag);
        match kind {
            MoeEvent::Begin => self.begin(world, rank, round),
            MoeEvent::Planned => self.planned(world, rank, round),
            MoeEvent::Packed => self.send_private(world, rank, round),
            MoeEvent::Routed => {
                self.progress_of(rank, round).routed = true;
                self.send_remainder(world, rank, round)
            }
            MoeEvent::Dispatched => {
                self.note(world, rank, round, Phase::Dispatch);
                let experts_s = self.job.costs.experts_s;
                self.after(world, rank, round, MoeEvent::Combine, experts_s)
            }
            MoeEvent::Combine => {
                self.ranks[rank as usize].begun_s = world.now();
                let bytes = self.traffic[round as usize].received(rank) * self.sizes.answer_bytes;
                let pack_s = world.constants().copy_s(bytes);
                let start_s = world.constants().launch_s + self.job.costs.combine_start_s;
                self.after(world, rank, round, MoeEvent::RepliesReady, start_s + pack_s)
            }
            MoeEvent::RepliesReady => self.send_replies(world, rank, round),
            MoeEvent::Combined => self.combined(world, rank, round),
            MoeEvent::Header => self.header_arrived(world, rank, round, 1),
            MoeEvent::Rows => {
                debug_assert_ne!(from, rank, "a rank keeps its own rows");
                self.progress_of(rank, round).rows += 1;
                self.end_dispatch(world, rank, round)
            }
            MoeEvent::Replies => {
                self.progress_of(rank, round).answers += 1;
                self.end_combine(world, rank, round)
            }
        }
    }

    fn finished(&self) -> Option<f64> {
        self.finished
    }

    fn deadlock(&self) -> Error {
        let last = self.ranks.iter().enumerate().min_by_key(|(_, rank)| rank.rounds_done);
        let (rank, round) = last.map_or((0, 0), |(rank, state)| (rank as u32, state.rounds_done));
        Error::Blocked { what: "the all-to-all", rank, round }
    }

    fn flow_name(&self, tag: u64) -> String {
        let (kind, round, from, to) = read_tag(tag);
        let what = match kind {
            MoeEvent::Header => "header",
            MoeEvent::Rows => "rows",
            MoeEvent::Replies => "replies",
            _ => "work",
        };
        format!("the {what} of rank {from} for rank {to} in round {round}")
    }

    fn progress(&self) -> f64 {
        (self.events as f64 / self.expected.max(1) as f64).min(1.0)
    }
}
