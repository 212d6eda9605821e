//! Training workload: each rank runs a program with compute and collectives.

use std::collections::VecDeque;

use weft_collectives::{AnySchedule, Schedule};
use weft_topology::EndpointId;

use super::model::{ComputeName, IterationProgram, Operation};
use crate::cluster::Straggler;
use crate::collective::{Execution, ExecutionConfig};
use crate::error::Error;
use crate::trace::Span;
use crate::workload::Workload;
use crate::world::World;

/// Bits in a collective's tags; the kind is above them.
const KIND_BITS: u32 = 33;

/// Rank state.
#[derive(Clone, Debug, Default)]
struct TrainingRank {
    at_s: f64,
    operation: usize,
    iteration: u32,
    slow: f64,
    /// Enqueued collectives: kind and enqueue time.
    queue: VecDeque<(u32, f64)>,
    /// Running collective: kind and begin.
    runs: Option<(u32, f64)>,
    /// Blocked until all collectives end.
    blocked: bool,
    /// Busy time on the rank's stream, and the part for which compute waited.
    communication_s: f64,
    exposed_s: f64,
    done: bool,
}

/// Model iterations on a set of ranks.
pub(crate) struct TrainingWorkload {
    program: IterationProgram,
    kinds: Vec<Execution<AnySchedule>>,
    ranks: Vec<TrainingRank>,
    iterations: u32,
    left: u32,
    last_s: f64,
    /// Time when each iteration ended on the last rank.
    ends_s: Vec<f64>,
}

/// Workload configuration.
pub(crate) struct TrainingConfig<'a> {
    pub program: IterationProgram,
    pub schedules: Vec<AnySchedule>,
    pub endpoints: Vec<Vec<EndpointId>>,
    pub iterations: u32,
    pub stragglers: &'a [Straggler],
    pub group: u64,
}

impl TrainingWorkload {
    pub fn new(world: &mut World, plan: TrainingConfig<'_>) -> Result<TrainingWorkload, Error> {
        let ranks = plan.schedules[0].ranks();
        let mut kinds = Vec::new();
        for (kind, (schedule, endpoints)) in
            plan.schedules.into_iter().zip(plan.endpoints).enumerate()
        {
            let bytes_of = |item: &Operation| match item {
                Operation::Collective { kind: other, bytes, .. } if *other as usize == kind => {
                    Some(*bytes)
                }
                _ => None,
            };
            let once: Vec<u64> = plan.program.operations.iter().filter_map(bytes_of).collect();
            let lengths = once.repeat(plan.iterations as usize);
            let setup = ExecutionConfig {
                endpoints,
                lengths: &lengths,
                stragglers: plan.stragglers,
                group: plan.group << 8 | kind as u64,
                base: (kind as u64) << KIND_BITS,
                first: kind == 0,
            };
            kinds.push(Execution::new(world, schedule, setup)?);
        }
        let mut states =
            vec![TrainingRank { slow: 1.0, ..TrainingRank::default() }; ranks as usize];
        for straggler in plan.stragglers {
            if let Some(state) = states.get_mut(straggler.rank as usize) {
                state.slow = straggler.slow;
                state.at_s = straggler.late_s;
            }
        }
        Ok(TrainingWorkload {
            program: plan.program,
            kinds,
            ranks: states,
            iterations: plan.iterations,
            left: ranks,
            last_s: 0.0,
            ends_s: vec![0.0; plan.iterations as usize],
        })
    }

    /// Time when each iteration ended on the last rank.
    pub fn ends_s(&self) -> &[f64] {
        &self.ends_s
    }

    /// Communication time per iteration and its exposed part, as means over ranks.
    pub fn communication_s(&self) -> (f64, f64) {
        let each = 1.0 / (self.ranks.len() as f64 * f64::from(self.iterations));
        let sum = |of: fn(&TrainingRank) -> f64| self.ranks.iter().map(of).sum::<f64>() * each;
        (sum(|rank| rank.communication_s), sum(|rank| rank.exposed_s))
    }

    /// Executes operations until the rank blocks.
    fn advance(&mut self, world: &mut World, rank: u32) -> Result<(), Error> {
        loop {
            let state = &mut self.ranks[rank as usize];
            if state.operation == self.program.operations.len() {
                let end_s = &mut self.ends_s[state.iteration as usize];
                *end_s = end_s.max(state.at_s);
                state.iteration += 1;
                state.operation = 0;
                if state.iteration == self.iterations {
                    state.done = true;
                    self.last_s = self.last_s.max(state.at_s);
                    self.left -= 1;
                    return Ok(());
                }
            }
            match self.program.operations[state.operation] {
                Operation::Compute { seconds, name } => {
                    let begin_s = state.at_s;
                    state.at_s += seconds * state.slow;
                    if world.traced() && seconds > 0.0 {
                        let (end_s, name) = (state.at_s, name.text());
                        let span =
                            Span { job: 0, rank, row: "compute", name, begin_s, end_s, bytes: 0 };
                        world.span(span);
                    }
                }
                Operation::Collective { kind, blocking, .. } => {
                    let at_s = state.at_s;
                    state.queue.push_back((kind, at_s));
                    self.begin_next(world, rank, at_s)?;
                    let state = &mut self.ranks[rank as usize];
                    if blocking {
                        state.operation += 1;
                        state.blocked = true;
                        return Ok(());
                    }
                }
                Operation::WaitAll => {
                    if state.runs.is_some() || !state.queue.is_empty() {
                        state.operation += 1;
                        state.blocked = true;
                        return Ok(());
                    }
                }
            }
            self.ranks[rank as usize].operation += 1;
        }
    }

    /// Begins the next collective on an idle stream.
    fn begin_next(&mut self, world: &mut World, rank: u32, free_s: f64) -> Result<(), Error> {
        let state = &mut self.ranks[rank as usize];
        if state.runs.is_some() {
            return Ok(());
        }
        let Some((kind, enqueued_s)) = state.queue.pop_front() else { return Ok(()) };
        let begin_s = enqueued_s.max(free_s);
        state.runs = Some((kind, begin_s));
        self.kinds[kind as usize].release(world, rank, begin_s)
    }

    /// Handles the collectives of one kind that completed at ranks.
    fn complete(&mut self, world: &mut World, kind: usize) -> Result<(), Error> {
        while let Some(completed) = self.kinds[kind].completed().pop() {
            let state = &mut self.ranks[completed.rank as usize];
            let (_, begin_s) = state.runs.take().unwrap_or((0, completed.at_s));
            state.communication_s += completed.at_s - begin_s;
            if world.traced() {
                let name = format!("{} {}", self.kinds[kind].schedule().name(), completed.vector);
                let (rank, end_s) = (completed.rank, completed.at_s);
                world.span(Span {
                    job: 0,
                    rank,
                    row: "collective",
                    name,
                    begin_s,
                    end_s,
                    bytes: 0,
                });
            }
            self.begin_next(world, completed.rank, completed.at_s)?;
            let state = &mut self.ranks[completed.rank as usize];
            if state.blocked && state.runs.is_none() {
                state.blocked = false;
                state.exposed_s += (completed.at_s - state.at_s).max(0.0);
                state.at_s = state.at_s.max(completed.at_s);
                self.advance(world, completed.rank)?;
            }
        }
        Ok(())
    }

    fn complete_all(&mut self, world: &mut World) -> Result<(), Error> {
        while let Some(kind) = self.kinds.iter_mut().position(|kind| !kind.completed().is_empty()) {
            self.complete(world, kind)?;
        }
        Ok(())
    }
}

impl ComputeName {
    fn text(self) -> String {
        match self {
            ComputeName::Forward(layer) => format!("forward {layer}"),
            ComputeName::Backward(layer) => format!("backward {layer}"),
            ComputeName::Optimizer => "optimizer".into(),
        }
    }
}

impl Workload for TrainingWorkload {
    fn start(&mut self, world: &mut World) -> Result<(), Error> {
        for rank in 0..self.ranks.len() as u32 {
            self.advance(world, rank)?;
        }
        self.complete_all(world)
    }

    fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error> {
        let kind = (tag >> KIND_BITS) as usize;
        self.kinds[kind].event(world, tag & ((1 << KIND_BITS) - 1))?;
        if self.kinds[kind].completed().is_empty() {
            return Ok(());
        }
        self.complete_all(world)
    }

    fn finished(&self) -> Option<f64> {
        (self.left == 0).then_some(self.last_s)
    }

    fn deadlock(&self) -> Error {
        let blocked = |kind: &&Execution<AnySchedule>| kind.is_blocked();
        self.kinds.iter().find(blocked).map_or(Error::NoWorkload, |kind| kind.deadlock())
    }

    fn flow_name(&self, tag: u64) -> String {
        let kind = (tag >> KIND_BITS) as usize;
        self.kinds[kind].flow_name(tag & ((1 << KIND_BITS) - 1))
    }

    fn progress(&self) -> f64 {
        let done: u32 = self.ranks.iter().map(|rank| rank.iteration).sum();
        f64::from(done) / (self.ranks.len() as f64 * f64::from(self.iterations))
    }
}
