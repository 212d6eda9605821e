//! Schedule execution: a cursor for each rank.
//!
//! A rank executes operations until it blocks on a lane. Reductions and copies advance the rank's clock ahead of the
//! world's, without an event: they are independent of other ranks, and a later wait takes the later clock. If several
//! workloads post at one NIC, the post order matters, and a rank that is ahead pauses until the world's clock catches
//! up.

use std::collections::VecDeque;

use weft_collectives::{Op, Rank, Schedule};
use weft_topology::EndpointId;

use super::connections::ConnectionTable;
use super::rank::{CompletedVector, RankCursor, WaitState};
use super::vectors::Vectors;
use crate::cluster::Straggler;
use crate::error::Error;
use crate::trace::Span;
use crate::world::World;
use weft_control::random::SplitMix64;

/// Tag bit for timers that resume a rank.
const WAKE: u64 = 1 << 32;

/// Runs of a schedule on vectors with given lengths.
pub(crate) struct Execution<S> {
    schedule: S,
    pub(super) ranks: Vec<RankCursor>,
    pub(super) connections: ConnectionTable,
    pub(super) vectors: Vectors,
    random: Option<SplitMix64>,
    /// Seconds per byte on the slowest endpoint link, for jitter proportional to the message.
    seconds_per_byte: f64,
    /// Post time and length for the writes in flight, by connection; filled for a trace.
    pub(super) posted: Vec<VecDeque<(f64, u64)>>,
    completed: Vec<CompletedVector>,
    last_s: f64,
    /// Unfinished segment count over all ranks.
    left: u64,
    base: u64,
}

/// Execution configuration.
pub(crate) struct ExecutionConfig<'a> {
    /// Each rank's endpoint.
    pub endpoints: Vec<EndpointId>,
    /// Lengths of the consecutive vectors.
    pub lengths: &'a [u64],
    /// Slow ranks.
    pub stragglers: &'a [Straggler],
    /// Number that separates connections and random numbers from other executions.
    pub group: u64,
    /// Tag offset; the tags are below 2^33.
    pub base: u64,
    /// True for the first execution at its ranks; later ones post at the same NICs in turn.
    pub first: bool,
}

impl<S: Schedule> Execution<S> {
    pub fn new(
        world: &mut World,
        schedule: S,
        setup: ExecutionConfig<'_>,
    ) -> Result<Execution<S>, Error> {
        let ranks = schedule.ranks();
        if setup.endpoints.len() != ranks as usize {
            let must = format!("the schedule's number of ranks, {ranks}");
            return Err(Error::field("placement", setup.endpoints.len(), must));
        }
        let most_bytes = world.constants().segment_bytes;
        let vectors = Vectors::new(&schedule, setup.lengths, most_bytes)?;
        if setup.first {
            for endpoint in &setup.endpoints {
                world.attach(*endpoint);
            }
        }
        let mut states: Vec<RankCursor> =
            (0..ranks).map(|rank| RankCursor::new(schedule.len(Rank(rank)))).collect();
        for straggler in setup.stragglers {
            if let Some(state) = states.get_mut(straggler.rank as usize) {
                state.slow = straggler.slow;
            }
        }
        let constants = world.constants();
        let jitters = constants.jitter_s > 0.0 || constants.jitter_share > 0.0;
        let seconds_per_byte = setup
            .endpoints
            .iter()
            .map(|endpoint| 1.0 / world.endpoint_bandwidth(*endpoint))
            .fold(0.0, f64::max);
        Ok(Execution {
            random: jitters.then(|| world.random(setup.group)),
            seconds_per_byte,
            left: u64::from(ranks) * u64::from(vectors.segments()),
            vectors,
            ranks: states,
            connections: ConnectionTable::new(setup.endpoints, setup.group),
            schedule,
            posted: Vec::new(),
            completed: Vec::new(),
            last_s: 0.0,
            base: setup.base,
        })
    }

    pub fn schedule(&self) -> &S {
        &self.schedule
    }

    /// Releases a rank's next vector at `at_s`; it begins after the previous one.
    pub fn release(&mut self, world: &mut World, rank: u32, at_s: f64) -> Result<(), Error> {
        let state = &mut self.ranks[rank as usize];
        *self.vectors.release_s(state.released, rank) = at_s;
        state.released += 1;
        let begins = state.waiting == WaitState::Release;
        if begins && state.segment < self.vectors.allowed(state.released) {
            self.begin(world, rank);
            self.advance(world, rank)?;
        }
        Ok(())
    }

    /// Vectors completed since the list was last cleared.
    pub fn completed(&mut self) -> &mut Vec<CompletedVector> {
        &mut self.completed
    }

    /// Time when the last segment ended at the last rank.
    pub fn finished(&self) -> Option<f64> {
        (self.left == 0).then_some(self.last_s)
    }

    /// Completes `tag`, given without the base.
    pub fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error> {
        if tag & WAKE != 0 {
            let rank = tag as u32;
            self.ranks[rank as usize].waiting = WaitState::Running;
            return self.advance(world, rank);
        }
        let number = tag as u32;
        if world.traced() {
            self.trace_write(world, number);
        }
        self.connections.arrive(world, number, self.base | tag)?;
        let connection = &self.connections.list[number as usize];
        let (from, to, in_flight) = (connection.from, connection.to, connection.in_flight());
        let state = &self.ranks[to as usize];
        if let WaitState::Lane { connection, lane, count } = state.waiting
            && connection == number
            && self.connections.risen(number, state.segment, lane, count)
        {
            self.resume(world, to);
            self.advance(world, to)?;
        }
        let state = &mut self.ranks[from as usize];
        state.in_flight -= 1;
        let resumes = match state.waiting {
            WaitState::Drain { connection } => connection == number && in_flight == 0,
            WaitState::OwnWrites => state.in_flight == 0,
            _ => false,
        };
        if resumes {
            state.at_s = state.at_s.max(world.now());
            state.waiting = WaitState::Running;
            self.advance(world, from)?;
        }
        Ok(())
    }

    fn begin(&mut self, world: &World, rank: u32) {
        let state = &mut self.ranks[rank as usize];
        let segment = self.vectors.segment(state.segment);
        state.waiting = WaitState::Running;
        state.op = 0;
        if segment.first {
            let release_s = *self.vectors.release_s(segment.vector, rank);
            state.at_s = state.at_s.max(release_s) + world.constants().launch_s * state.slow;
        }
    }

    /// Resumes a rank blocked on a lane.
    fn resume(&mut self, world: &World, rank: u32) {
        let state = &mut self.ranks[rank as usize];
        state.at_s = state.at_s.max(world.now()) + world.constants().wait_s * state.slow;
        state.waiting = WaitState::Running;
        state.op += 1;
    }

    /// Executes operations until the rank blocks.
    fn advance(&mut self, world: &mut World, rank: u32) -> Result<(), Error> {
        loop {
            let state = &mut self.ranks[rank as usize];
            if state.op == state.len {
                if !self.end_segment(world, rank) {
                    return Ok(());
                }
                continue;
            }
            let segment = state.segment;
            match self.schedule.op(Rank(rank), state.op) {
                Op::Write { to, source, target, lane, .. } => {
                    let endpoint = self.connections.endpoint(rank);
                    let state = &mut self.ranks[rank as usize];
                    if state.at_s > world.now() && world.shared(endpoint) {
                        state.waiting = WaitState::Clock;
                        return world
                            .timer(state.at_s - world.now(), self.base | WAKE | u64::from(rank));
                    }
                    let sizes = self.vectors.segment(segment).sizes;
                    let bytes = sizes.write(&self.schedule, rank, source, to.0, target);
                    self.write(world, rank, to.0, lane, bytes)?;
                }
                Op::Wait { from, lane, count } => {
                    let number = self.incoming(world, rank, from.0)?;
                    if !self.connections.risen(number, segment, lane, count) {
                        let waiting = WaitState::Lane { connection: number, lane, count };
                        self.ranks[rank as usize].waiting = waiting;
                        return Ok(());
                    }
                    let state = &mut self.ranks[rank as usize];
                    state.at_s += world.constants().wait_s * state.slow;
                }
                Op::Drain { to } => {
                    let number = self.outgoing(world, rank, to.0)?;
                    if self.connections.list[number as usize].in_flight() > 0 {
                        self.ranks[rank as usize].waiting = WaitState::Drain { connection: number };
                        // The operation ends with the writes and is not executed again.
                        self.ranks[rank as usize].op += 1;
                        return Ok(());
                    }
                }
                Op::Reduce { source, target } => {
                    let sizes = self.vectors.segment(segment).sizes;
                    let bytes = sizes.local(&self.schedule, rank, source, target);
                    let seconds = world.constants().reduce_s(bytes);
                    self.spend(world, rank, "reduce", seconds, bytes);
                }
                Op::Copy { source, target } => {
                    let sizes = self.vectors.segment(segment).sizes;
                    let bytes = sizes.local(&self.schedule, rank, source, target);
                    let seconds = world.constants().copy_s(bytes);
                    self.spend(world, rank, "copy", seconds, bytes);
                }
            }
            self.ranks[rank as usize].op += 1;
        }
    }

    fn write(
        &mut self,
        world: &mut World,
        rank: u32,
        to: u32,
        lane: u32,
        bytes: u64,
    ) -> Result<(), Error> {
        let number = self.outgoing(world, rank, to)?;
        let state = &mut self.ranks[rank as usize];
        state.in_flight += 1;
        let constants = world.constants();
        let mut posted_s = if constants.post_s > 0.0 {
            let seconds = constants.post_s * state.slow;
            world.post(self.connections.endpoint(rank), state.at_s, seconds)
        } else {
            state.at_s
        };
        let constants = world.constants();
        if let Some(random) = &mut self.random {
            let wire_s = bytes as f64 * self.seconds_per_byte;
            posted_s +=
                random.exponential() * (constants.jitter_s + constants.jitter_share * wire_s);
        }
        if world.traced() {
            self.posted.resize(self.connections.list.len(), VecDeque::new());
            self.posted[number as usize].push_back((posted_s, bytes));
        }
        self.connections.send(world, number, lane, bytes, posted_s, self.base | u64::from(number))
    }

    fn spend(&mut self, world: &mut World, rank: u32, name: &str, seconds: f64, bytes: u64) {
        let state = &mut self.ranks[rank as usize];
        let begin_s = state.at_s;
        state.at_s += seconds * state.slow;
        if seconds > 0.0 && world.traced() {
            let end_s = state.at_s;
            let name = name.to_string();
            world.span(Span { job: 0, rank, row: "compute", name, begin_s, end_s, bytes });
        }
    }

    /// Ends the rank's segment; true if it begins another one.
    fn end_segment(&mut self, world: &World, rank: u32) -> bool {
        let state = &mut self.ranks[rank as usize];
        if state.segment == 0 {
            self.connections.end_first_segment(rank);
        }
        if state.in_flight > 0 {
            state.waiting = WaitState::OwnWrites;
            return false;
        }
        let segment = self.vectors.segment(state.segment);
        if segment.last {
            self.completed.push(CompletedVector { rank, vector: segment.vector, at_s: state.at_s });
        }
        self.last_s = self.last_s.max(state.at_s);
        self.left -= 1;
        state.segment += 1;
        if state.segment < self.vectors.allowed(state.released) {
            self.begin(world, rank);
            return true;
        }
        state.waiting = WaitState::Release;
        false
    }

    fn outgoing(&mut self, world: &mut World, rank: u32, to: u32) -> Result<u32, Error> {
        let (peer, number) = self.ranks[rank as usize].to;
        if peer == to {
            return Ok(number);
        }
        let number = self.connections.get(world, rank, to)?;
        self.ranks[rank as usize].to = (to, number);
        Ok(number)
    }

    fn incoming(&mut self, world: &mut World, rank: u32, from: u32) -> Result<u32, Error> {
        let (peer, number) = self.ranks[rank as usize].from;
        if peer == from {
            return Ok(number);
        }
        let number = self.connections.get(world, from, rank)?;
        self.ranks[rank as usize].from = (from, number);
        Ok(number)
    }

    /// Records the span for an arrived write.
    fn trace_write(&mut self, world: &mut World, number: u32) {
        let connection = &self.connections.list[number as usize];
        let (rank, name) = (connection.from, format!("to {}", connection.to));
        let end_s = world.now();
        let posted = self.posted.get_mut(number as usize).and_then(VecDeque::pop_front);
        let (begin_s, bytes) = posted.unwrap_or((end_s, 0));
        world.span(Span { job: 0, rank, row: "network", name, begin_s, end_s, bytes });
    }
}
