//! A round as a state machine on a world.
//!
//! A rank is never more than one round ahead of another: it cannot end dispatch without everybody's
//! header. So what has arrived is kept for two rounds, in turn.

use serde_json::Value;
use weft_moe::SendPlan;

use super::report::{Phase, Times};
use super::spec::MoeJob;
use super::traffic::{Traffic, Weights};
use crate::error::Error;
use crate::spec::Cluster;
use crate::trace::Span;
use crate::workload::Workload;
use crate::world::{Path, World};

/// What a tag stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The rank calls dispatch.
    Begin,
    /// Its header can be posted.
    Planned,
    /// Its rows can be posted.
    Packed,
    /// It knows all offsets.
    Routed,
    /// Its experts may begin.
    Dispatched,
    /// It calls combine.
    Combine,
    /// Its answers can be posted.
    Answered,
    /// Its sums are there.
    Combined,
    /// A header has arrived.
    Header,
    /// A part of rows has arrived.
    Rows,
    /// A part of answers has arrived.
    Answers,
}

const KINDS: [Kind; 11] = [
    Kind::Begin,
    Kind::Planned,
    Kind::Packed,
    Kind::Routed,
    Kind::Dispatched,
    Kind::Combine,
    Kind::Answered,
    Kind::Combined,
    Kind::Header,
    Kind::Rows,
    Kind::Answers,
];

/// Kind, round, source and destination in one number.
const SIDE_BITS: u32 = 16;
const ROUND_BITS: u32 = 8;

fn tag(kind: Kind, round: u32, from: u32, to: u32) -> u64 {
    let sides = u64::from(from) << SIDE_BITS | u64::from(to);
    (u64::from(kind as u8) << ROUND_BITS | u64::from(round)) << (2 * SIDE_BITS) | sides
}

fn read_tag(tag: u64) -> (Kind, u32, u32, u32) {
    let side = |bits: u64| (bits & ((1 << SIDE_BITS) - 1)) as u32;
    let head = tag >> (2 * SIDE_BITS);
    let round = (head & ((1 << ROUND_BITS) - 1)) as u32;
    (KINDS[(head >> ROUND_BITS) as usize], round, side(tag >> SIDE_BITS), side(tag))
}

/// What has arrived at a rank in one round, and how far the rank is.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    headers: u32,
    rows: u32,
    answers: u32,
    packed: bool,
    routed: bool,
    dispatch_ended: bool,
    answers_sent: bool,
    combine_ended: bool,
}

#[derive(Clone, Debug, Default)]
struct Rank {
    slow: f64,
    late_s: f64,
    begun_s: f64,
    progress: [Progress; 2],
    rounds_done: u32,
}

/// The ranks of an all-to-all, all their rounds.
pub struct MoeWorkload {
    job: MoeJob,
    weights: Weights,
    traffic: Vec<Traffic>,
    ranks: Vec<Rank>,
    /// By source and destination: the path of each NIC, or of dispatch and of combine over NVLink.
    paths: Vec<Path>,
    /// Paths of a pair of ranks.
    stride: usize,
    first_private: u32,
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
            paths: Vec::new(),
            stride: job.nics_per_rank.max(2) as usize,
            first_private,
            times: Times::default(),
            events: 0,
            expected: 0,
            left: job.ranks,
            finished: None,
            job: job.clone(),
        };
        workload.find_paths(world)?;
        workload.expected = workload.count_events();
        Ok(workload)
    }

    fn find_paths(&mut self, world: &mut World) -> Result<(), Error> {
        let job = &self.job;
        let nothing = world.private_path(&[], 0.0)?;
        let pairs = (job.ranks * job.ranks) as usize;
        self.paths = vec![nothing; pairs * self.stride];
        for source in 0..job.ranks {
            for nic in 0..job.nics_per_rank {
                world.attach(job.endpoint(source, nic));
            }
            for destination in (0..job.ranks).filter(|rank| *rank != source) {
                let first = (source * job.ranks + destination) as usize * self.stride;
                if let Some(nvlink) = &job.nvlink
                    && job.same_domain(source, destination)
                {
                    for phase in 0..2 {
                        let side = |rank: u32, side: u32| self.first_private + 4 * rank + side;
                        let links = [side(source, 2 * phase), side(destination, 2 * phase + 1)];
                        let path = world.private_path(&links, nvlink.latency_s)?;
                        self.paths[first + phase as usize] = path;
                    }
                    continue;
                }
                for nic in 0..job.nics_per_rank {
                    let (from, to) = (job.endpoint(source, nic), job.endpoint(destination, nic));
                    let connection = u64::from(source) << 32 | u64::from(destination) << 8;
                    let path = if from == to {
                        nothing
                    } else {
                        world.path(from, to, connection | u64::from(nic))?
                    };
                    self.paths[first + nic as usize] = path;
                }
            }
        }
        Ok(())
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

    fn progress_of(&mut self, rank: u32, round: u32) -> &mut Progress {
        &mut self.ranks[rank as usize].progress[(round % 2) as usize]
    }

    /// The other ranks, beginning behind this one, so that not all write to one first.
    fn peers(&self, rank: u32) -> impl Iterator<Item = u32> + use<> {
        let ranks = self.job.ranks;
        (1..ranks).map(move |step| (rank + step) % ranks)
    }

    /// How many parts a write of rows from `source` to `destination` has.
    fn parts(&self, source: u32, destination: u32) -> u32 {
        if self.job.same_domain(source, destination) { 1 } else { self.job.nics_per_rank }
    }

    /// The parts of rows that a rank receives in a round.
    fn expected_rows(&self, rank: u32, round: u32) -> u32 {
        let writes = |peer: u32| match self.traffic[round as usize].rows(peer, rank) {
            0 => 0,
            rows => u32::from(self.private(rows) > 0) + u32::from(rows > self.private(rows)),
        };
        self.peers(rank).map(|peer| writes(peer) * self.parts(peer, rank)).sum()
    }

    fn expected_answers(&self, rank: u32, round: u32) -> u32 {
        let some = |peer: &u32| self.traffic[round as usize].rows(rank, *peer) > 0;
        self.peers(rank).filter(some).map(|peer| self.parts(peer, rank)).sum()
    }

    fn private(&self, rows: u32) -> u32 {
        rows.min(self.weights.private_rows)
    }

    /// Writes `bytes` to a peer: at once over NVLink, and else once the NIC has posted it.
    fn write(
        &mut self,
        world: &mut World,
        kind: Kind,
        round: u32,
        (from, to): (u32, u32),
        bytes: u64,
    ) -> Result<(), Error> {
        let first = (from * self.job.ranks + to) as usize * self.stride;
        let tag = tag(kind, round, from, to);
        if self.job.same_domain(from, to) {
            let path = self.paths[first + usize::from(kind == Kind::Answers)];
            return world.start_flow(path, bytes, path.latency_s, tag);
        }
        let now = world.now();
        let post_s = world.constants().post_s * self.ranks[from as usize].slow;
        let posted = world.post(self.job.endpoint(from, 0), now, post_s);
        // A header is short: one part, on the first NIC.
        let parts = if kind == Kind::Header { 1 } else { u64::from(self.job.nics_per_rank) };
        for part in 0..parts {
            let path = self.paths[first + part as usize];
            let bytes = bytes * (part + 1) / parts - bytes * part / parts;
            world.start_flow(path, bytes, posted - now + path.latency_s, tag)?;
        }
        Ok(())
    }

    fn after(
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

    fn planned(&mut self, world: &mut World, rank: u32, round: u32) -> Result<(), Error> {
        for peer in self.peers(rank) {
            self.write(world, Kind::Header, round, (rank, peer), self.weights.header_bytes)?;
        }
        let bytes = self.traffic[round as usize].sent(rank) * self.weights.row_bytes;
        let staged = self.traffic[round as usize].sent_where(rank, |peer| {
            // What stays in the domain is stored straight into the peer's memory.
            !self.job.same_domain(rank, peer)
        }) * self.weights.row_bytes;
        let staging_s = self.job.costs.staging_bytes_per_s.map_or(0.0, |rate| staged as f64 / rate);
        let pack_s = world.constants().copy_s(bytes) + staging_s;
        self.after(world, rank, round, Kind::Packed, pack_s)?;
        // A rank alone has no header to wait for.
        self.header_arrived(world, rank, round, 0)
    }

    fn header_arrived(
        &mut self,
        world: &mut World,
        rank: u32,
        round: u32,
        headers: u32,
    ) -> Result<(), Error> {
        let all = self.job.ranks - 1;
        let progress = self.progress_of(rank, round);
        progress.headers += headers;
        if progress.headers == all && (headers > 0 || all == 0) {
            let route_s = self.job.costs.route_s;
            self.after(world, rank, round, Kind::Routed, route_s)?;
        }
        Ok(())
    }

    fn send_private(&mut self, world: &mut World, rank: u32, round: u32) -> Result<(), Error> {
        self.progress_of(rank, round).packed = true;
        for peer in self.peers(rank) {
            let rows = self.private(self.traffic[round as usize].rows(rank, peer));
            if rows > 0 {
                let bytes = u64::from(rows) * self.weights.row_bytes;
                self.write(world, Kind::Rows, round, (rank, peer), bytes)?;
            }
        }
        self.send_remainder(world, rank, round)
    }

    /// The rest leaves once offsets are known and the first rows have left.
    fn send_remainder(&mut self, world: &mut World, rank: u32, round: u32) -> Result<(), Error> {
        let progress = *self.progress_of(rank, round);
        if !(progress.packed && progress.routed) {
            return Ok(());
        }
        for peer in self.peers(rank) {
            let all = self.traffic[round as usize].rows(rank, peer);
            let rows = all - self.private(all);
            if rows > 0 {
                let bytes = u64::from(rows) * self.weights.row_bytes;
                self.write(world, Kind::Rows, round, (rank, peer), bytes)?;
            }
        }
        self.end_dispatch(world, rank, round)
    }

    /// Whatever the rank waits for in dispatch may be there.
    fn end_dispatch(&mut self, world: &mut World, rank: u32, round: u32) -> Result<(), Error> {
        let expected = self.expected_rows(rank, round);
        let progress = self.progress_of(rank, round);
        let complete = progress.packed && progress.routed && progress.rows == expected;
        if !complete || progress.dispatch_ended {
            return Ok(());
        }
        progress.dispatch_ended = true;
        let bytes = self.traffic[round as usize].received(rank) * self.weights.row_bytes;
        let (wait_s, unpack_s) = (world.constants().wait_s, world.constants().copy_s(bytes));
        let end_s = wait_s + unpack_s + self.job.costs.dispatch_end_s;
        self.after(world, rank, round, Kind::Dispatched, end_s)
    }

    fn send_answers(&mut self, world: &mut World, rank: u32, round: u32) -> Result<(), Error> {
        for peer in self.peers(rank) {
            let rows = self.traffic[round as usize].rows(peer, rank);
            if rows > 0 {
                let bytes = u64::from(rows) * self.weights.answer_bytes;
                self.write(world, Kind::Answers, round, (rank, peer), bytes)?;
            }
        }
        self.progress_of(rank, round).answers_sent = true;
        self.end_combine(world, rank, round)
    }

    fn end_combine(&mut self, world: &mut World, rank: u32, round: u32) -> Result<(), Error> {
        let expected = self.expected_answers(rank, round);
        let progress = self.progress_of(rank, round);
        let complete = progress.answers_sent && progress.answers == expected;
        if !complete || progress.combine_ended {
            return Ok(());
        }
        progress.combine_ended = true;
        let bytes = self.traffic[round as usize].sent(rank) * self.weights.answer_bytes;
        let (wait_s, sum_s) = (world.constants().wait_s, world.constants().reduce_s(bytes));
        let end_s = wait_s + sum_s + self.job.costs.combine_end_s;
        self.after(world, rank, round, Kind::Combined, end_s)
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
