//! A schedule as it runs: a cursor for each rank.
//!
//! A rank goes from operation to operation until it has to wait for a lane. What it spends by itself
//! (reductions, copies) moves its own clock ahead of the world's, without an event: nothing that others do
//! in the meantime changes it, and a wait that follows takes the later of the two. Only where several
//! workloads post at one NIC, so that the order of posts matters, does a rank that is ahead pause for the
//! world to come after.

use std::collections::VecDeque;

use weft_collectives::{Op, Rank, Schedule};
use weft_topology::EndpointId;

use super::connections::Connections;
use super::rank::{Ended, RankState, Waiting};
use super::vectors::Vectors;
use crate::error::Error;
use crate::random::Random;
use crate::spec::Straggler;
use crate::trace::Span;
use crate::world::World;

/// Tags with this bit are of timers that wake a rank.
const WAKE: u64 = 1 << 32;

/// A schedule that runs once or several times, on vectors of given lengths.
pub(crate) struct Execution<S> {
    schedule: S,
    pub(super) ranks: Vec<RankState>,
    pub(super) connections: Connections,
    pub(super) vectors: Vectors,
    random: Option<Random>,
    /// Seconds per byte of the slowest link of an endpoint, for jitter that grows with a message.
    seconds_per_byte: f64,
    /// By connection, when its writes that are under way were posted and how long they are, if a trace is
    /// kept.
    pub(super) posted: Vec<VecDeque<(f64, u64)>>,
    ended: Vec<Ended>,
    last_s: f64,
    /// Rounds that ranks have not ended.
    left: u64,
    base: u64,
}

/// What an execution needs beside its schedule.
pub(crate) struct Setup<'a> {
    /// Where each rank is.
    pub endpoints: Vec<EndpointId>,
    /// The lengths of the vectors, one after the other.
    pub lengths: &'a [u64],
    /// Ranks that are slow.
    pub stragglers: &'a [Straggler],
    /// Tells its connections from those of others, and its random numbers.
    pub group: u64,
    /// Is added to the tags that it uses, which are below 2^33.
    pub base: u64,
    /// Whether it is the first at its ranks, or another one of theirs posts at the same NICs in turn.
    pub first: bool,
}

impl<S: Schedule> Execution<S> {
    pub fn new(world: &mut World, schedule: S, setup: Setup<'_>) -> Result<Execution<S>, Error> {
        let ranks = schedule.ranks();
        if setup.endpoints.len() != ranks as usize {
            let must = format!("the schedule's number of ranks, {ranks}");
            return Err(Error::field("placement", setup.endpoints.len(), must));
        }
        let segment = world.constants().segment_bytes;
        let vectors = Vectors::new(&schedule, setup.lengths, segment)?;
        if setup.first {
            for endpoint in &setup.endpoints {
                world.attach(*endpoint);
            }
        }
        let mut states: Vec<RankState> =
            (0..ranks).map(|rank| RankState::new(schedule.len(Rank(rank)))).collect();
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
            left: u64::from(ranks) * u64::from(vectors.rounds()),
            vectors,
            ranks: states,
            connections: Connections::new(setup.endpoints, setup.group),
            schedule,
            posted: Vec::new(),
            ended: Vec::new(),
            last_s: 0.0,
            base: setup.base,
        })
    }

    pub fn schedule(&self) -> &S {
        &self.schedule
    }

    /// Lets a rank begin its next vector that was not released yet, at `at_s` or when it has ended the one
    /// before.
    pub fn release(&mut self, world: &mut World, rank: u32, at_s: f64) -> Result<(), Error> {
        let state = &mut self.ranks[rank as usize];
        *self.vectors.release_s(state.released, rank) = at_s;
        state.released += 1;
        let begins = state.waiting == Waiting::Release;
        if begins && state.round < self.vectors.allowed(state.released) {
            self.begin(world, rank);
            self.go(world, rank)?;
        }
        Ok(())
    }

    /// What ended since this was last asked.
    pub fn ended(&mut self) -> &mut Vec<Ended> {
        &mut self.ended
    }

    /// When the last rank ended the last round, once it has.
    pub fn finished(&self) -> Option<f64> {
        (self.left == 0).then_some(self.last_s)
    }

    /// A tag came back, less the base.
    pub fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error> {
        if tag & WAKE != 0 {
            let rank = tag as u32;
            self.ranks[rank as usize].waiting = Waiting::No;
            return self.go(world, rank);
        }
        let number = tag as u32;
        if world.traced() {
            self.trace_write(world, number);
        }
        self.connections.arrive(world, number, self.base | tag)?;
        let connection = &self.connections.list[number as usize];
        let (from, to, under_way) = (connection.from, connection.to, connection.under_way());
        let state = &self.ranks[to as usize];
        if let Waiting::Lane { connection, lane, count } = state.waiting
            && connection == number
            && self.connections.risen(number, state.round, lane, count)
        {
            self.wake(world, to);
            self.go(world, to)?;
        }
        let state = &mut self.ranks[from as usize];
        state.under_way -= 1;
        let goes_on = match state.waiting {
            Waiting::Drain { connection } => connection == number && under_way == 0,
            Waiting::End => state.under_way == 0,
            _ => false,
        };
        if goes_on {
            state.at_s = state.at_s.max(world.now());
            state.waiting = Waiting::No;
            self.go(world, from)?;
        }
        Ok(())
    }

    fn begin(&mut self, world: &World, rank: u32) {
        let state = &mut self.ranks[rank as usize];
        let round = self.vectors.round(state.round);
        state.waiting = Waiting::No;
        state.op = 0;
        if round.first {
            let release_s = *self.vectors.release_s(round.vector, rank);
            state.at_s = state.at_s.max(release_s) + world.constants().launch_s * state.slow;
        }
    }

    /// Ends a wait for a lane.
    fn wake(&mut self, world: &World, rank: u32) {
        let state = &mut self.ranks[rank as usize];
        state.at_s = state.at_s.max(world.now()) + world.constants().wait_s * state.slow;
        state.waiting = Waiting::No;
        state.op += 1;
    }

    /// Goes from operation to operation until the rank has to wait.
    fn go(&mut self, world: &mut World, rank: u32) -> Result<(), Error> {
        loop {
            let state = &mut self.ranks[rank as usize];
            if state.op == state.len {
                if !self.end_round(world, rank) {
                    return Ok(());
                }
                continue;
            }
            let round = state.round;
            match self.schedule.op(Rank(rank), state.op) {
                Op::Write { to, source, target, lane, .. } => {
                    let endpoint = self.connections.endpoint(rank);
                    let state = &mut self.ranks[rank as usize];
                    if state.at_s > world.now() && world.shared(endpoint) {
                        state.waiting = Waiting::Clock;
                        return world
                            .timer(state.at_s - world.now(), self.base | WAKE | u64::from(rank));
                    }
                    let sizes = self.vectors.round(round).sizes;
                    let bytes = sizes.write(&self.schedule, rank, source, to.0, target);
                    self.write(world, rank, to.0, lane, bytes)?;
                }
                Op::Wait { from, lane, count } => {
                    let number = self.incoming(world, rank, from.0)?;
                    if !self.connections.risen(number, round, lane, count) {
                        let waiting = Waiting::Lane { connection: number, lane, count };
                        self.ranks[rank as usize].waiting = waiting;
                        return Ok(());
                    }
                    let state = &mut self.ranks[rank as usize];
                    state.at_s += world.constants().wait_s * state.slow;
                }
                Op::Drain { to } => {
                    let number = self.outgoing(world, rank, to.0)?;
                    if self.connections.list[number as usize].under_way() > 0 {
                        self.ranks[rank as usize].waiting = Waiting::Drain { connection: number };
                        // The operation is done once the writes are: it is not looked at again.
                        self.ranks[rank as usize].op += 1;
                        return Ok(());
                    }
                }
                Op::Reduce { source, target } => {
                    let sizes = self.vectors.round(round).sizes;
                    let bytes = sizes.local(&self.schedule, rank, source, target);
                    let seconds = world.constants().reduce_s(bytes);
                    self.spend(world, rank, "reduce", seconds, bytes);
                }
                Op::Copy { source, target } => {
                    let sizes = self.vectors.round(round).sizes;
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
        state.under_way += 1;
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

    /// The rank has done its last operation. Gives whether it goes on with another round.
    fn end_round(&mut self, world: &World, rank: u32) -> bool {
        let state = &mut self.ranks[rank as usize];
        if state.round == 0 {
            self.connections.end_first_round(rank);
        }
        if state.under_way > 0 {
            state.waiting = Waiting::End;
            return false;
        }
        let round = self.vectors.round(state.round);
        if round.last {
            self.ended.push(Ended { rank, vector: round.vector, at_s: state.at_s });
        }
        self.last_s = self.last_s.max(state.at_s);
        self.left -= 1;
        state.round += 1;
        if state.round < self.vectors.allowed(state.released) {
            self.begin(world, rank);
            return true;
        }
        state.waiting = Waiting::Release;
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
}
