//! Training as a workload: for each rank a program of compute and collectives.

use std::collections::VecDeque;

use weft_collectives::{AnySchedule, Schedule};
use weft_topology::EndpointId;

use super::model::{Item, Iteration, Name};
use crate::collective::{Execution, Setup};
use crate::error::Error;
use crate::spec::Straggler;
use crate::trace::Span;
use crate::workload::Workload;
use crate::world::World;

/// Every kind of collective has its tags above this bit.
const KIND_BITS: u32 = 33;

/// What a rank does now.
#[derive(Clone, Debug, Default)]
struct RankState {
    at_s: f64,
    item: usize,
    iteration: u32,
    slow: f64,
    /// Collectives handed over and not yet begun: kind, and when they were handed over.
    queue: VecDeque<(u32, f64)>,
    /// The one that runs, and since when.
    runs: Option<(u32, f64)>,
    /// It does not go on before all are done.
    blocked: bool,
    /// How long its stream was busy, and how long its compute waited for it.
    communication_s: f64,
    exposed_s: f64,
    done: bool,
}

/// Iterations of a model on a set of ranks.
pub(crate) struct Training {
    program: Iteration,
    kinds: Vec<Execution<AnySchedule>>,
    ranks: Vec<RankState>,
    iterations: u32,
    left: u32,
    last_s: f64,
    /// When each iteration ended at its last rank.
    ends_s: Vec<f64>,
}

/// What training needs beside its program.
pub(crate) struct Plan<'a> {
    pub program: Iteration,
    pub schedules: Vec<AnySchedule>,
    pub endpoints: Vec<Vec<EndpointId>>,
    pub iterations: u32,
    pub stragglers: &'a [Straggler],
    pub group: u64,
}

impl Training {
    pub fn new(world: &mut World, plan: Plan<'_>) -> Result<Training, Error> {
        let ranks = plan.schedules[0].ranks();
        let mut kinds = Vec::new();
        for (kind, (schedule, endpoints)) in
            plan.schedules.into_iter().zip(plan.endpoints).enumerate()
        {
            let bytes_of = |item: &Item| match item {
                Item::Collective { kind: other, bytes, .. } if *other as usize == kind => {
                    Some(*bytes)
                }
                _ => None,
            };
            let once: Vec<u64> = plan.program.items.iter().filter_map(bytes_of).collect();
            let lengths = once.repeat(plan.iterations as usize);
            let setup = Setup {
                endpoints,
                lengths: &lengths,
                stragglers: plan.stragglers,
                group: plan.group << 8 | kind as u64,
                base: (kind as u64) << KIND_BITS,
                first: kind == 0,
            };
            kinds.push(Execution::new(world, schedule, setup)?);
        }
        let mut states = vec![RankState { slow: 1.0, ..RankState::default() }; ranks as usize];
        for straggler in plan.stragglers {
            if let Some(state) = states.get_mut(straggler.rank as usize) {
                state.slow = straggler.slow;
                state.at_s = straggler.late_s;
            }
        }
        Ok(Training {
            program: plan.program,
            kinds,
            ranks: states,
            iterations: plan.iterations,
            left: ranks,
            last_s: 0.0,
            ends_s: vec![0.0; plan.iterations as usize],
        })
    }

    /// When each iteration ended at its last rank.
    pub fn ends_s(&self) -> &[f64] {
        &self.ends_s
    }

    /// The mean over ranks of how long an iteration's collectives ran, and how long compute waited for them.
    pub fn communication_s(&self) -> (f64, f64) {
        let each = 1.0 / (self.ranks.len() as f64 * f64::from(self.iterations));
        let sum = |of: fn(&RankState) -> f64| self.ranks.iter().map(of).sum::<f64>() * each;
        (sum(|rank| rank.communication_s), sum(|rank| rank.exposed_s))
    }

    /// Goes from item to item until the rank has to wait.
    fn go(&mut self, world: &mut World, rank: u32) -> Result<(), Error> {
        loop {
            let state = &mut self.ranks[rank as usize];
            if state.item == self.program.items.len() {
                let end_s = &mut self.ends_s[state.iteration as usize];
                *end_s = end_s.max(state.at_s);
                state.iteration += 1;
                state.item = 0;
                if state.iteration == self.iterations {
                    state.done = true;
                    self.last_s = self.last_s.max(state.at_s);
                    self.left -= 1;
                    return Ok(());
                }
            }
            match self.program.items[state.item] {
                Item::Compute { seconds, name } => {
                    let begin_s = state.at_s;
                    state.at_s += seconds * state.slow;
                    if world.traced() && seconds > 0.0 {
                        let (end_s, name) = (state.at_s, name.text());
                        let span =
                            Span { job: 0, rank, row: "compute", name, begin_s, end_s, bytes: 0 };
                        world.span(span);
                    }
                }
                Item::Collective { kind, blocking, .. } => {
                    let at_s = state.at_s;
                    state.queue.push_back((kind, at_s));
                    self.feed(world, rank, at_s)?;
                    let state = &mut self.ranks[rank as usize];
                    if blocking {
                        state.item += 1;
                        state.blocked = true;
                        return Ok(());
                    }
                }
                Item::Join => {
                    if state.runs.is_some() || !state.queue.is_empty() {
                        state.item += 1;
                        state.blocked = true;
                        return Ok(());
                    }
                }
            }
            self.ranks[rank as usize].item += 1;
        }
    }

    /// Begins the next collective of a rank's stream if none runs.
    fn feed(&mut self, world: &mut World, rank: u32, free_s: f64) -> Result<(), Error> {
        let state = &mut self.ranks[rank as usize];
        if state.runs.is_some() {
            return Ok(());
        }
        let Some((kind, handed_s)) = state.queue.pop_front() else { return Ok(()) };
        let begin_s = handed_s.max(free_s);
        state.runs = Some((kind, begin_s));
        self.kinds[kind as usize].release(world, rank, begin_s)
    }

    /// Deals with collectives that ended at ranks.
    fn follow(&mut self, world: &mut World, kind: usize) -> Result<(), Error> {
        while let Some(ended) = self.kinds[kind].ended().pop() {
            let state = &mut self.ranks[ended.rank as usize];
            let (_, begin_s) = state.runs.take().unwrap_or((0, ended.at_s));
            state.communication_s += ended.at_s - begin_s;
            if world.traced() {
                let name = format!("{} {}", self.kinds[kind].schedule().name(), ended.vector);
                let (rank, end_s) = (ended.rank, ended.at_s);
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
            self.feed(world, ended.rank, ended.at_s)?;
            let state = &mut self.ranks[ended.rank as usize];
            if state.blocked && state.runs.is_none() {
                state.blocked = false;
                state.exposed_s += (ended.at_s - state.at_s).max(0.0);
                state.at_s = state.at_s.max(ended.at_s);
                self.go(world, ended.rank)?;
            }
        }
        Ok(())
    }

    fn follow_all(&mut self, world: &mut World) -> Result<(), Error> {
        while let Some(kind) = self.kinds.iter_mut().position(|kind| !kind.ended().is_empty()) {
            self.follow(world, kind)?;
        }
        Ok(())
    }
}

impl Name {
    fn text(self) -> String {
        match self {
            Name::Forward(layer) => format!("forward {layer}"),
            Name::Backward(layer) => format!("backward {layer}"),
            Name::Optimizer => "optimizer".into(),
        }
    }
}

impl Workload for Training {
    fn start(&mut self, world: &mut World) -> Result<(), Error> {
        for rank in 0..self.ranks.len() as u32 {
            self.go(world, rank)?;
        }
        self.follow_all(world)
    }

    fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error> {
        let kind = (tag >> KIND_BITS) as usize;
        self.kinds[kind].event(world, tag & ((1 << KIND_BITS) - 1))?;
        if self.kinds[kind].ended().is_empty() {
            return Ok(());
        }
        self.follow_all(world)
    }

    fn finished(&self) -> Option<f64> {
        (self.left == 0).then_some(self.last_s)
    }

    fn stuck(&self) -> Error {
        let waits = |kind: &&Execution<AnySchedule>| kind.stands();
        self.kinds.iter().find(waits).map_or(Error::Nothing, |kind| kind.deadlock())
    }

    fn describe(&self, tag: u64) -> String {
        let kind = (tag >> KIND_BITS) as usize;
        self.kinds[kind].describe(tag & ((1 << KIND_BITS) - 1))
    }

    fn progress(&self) -> f64 {
        let done: u32 = self.ranks.iter().map(|rank| rank.iteration).sum();
        f64::from(done) / (self.ranks.len() as f64 * f64::from(self.iterations))
    }
}
