//! Plan: one rank's operations on one chunk, with all positions, lanes and counts resolved.

use super::direct_results;
use super::layout::{Layout, Piece, Place};
use super::step::{Plan, Step};
use crate::op::{Buffer, Collective, Op, Rank, Span};
use crate::schedule::Schedule;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use weft_fabric::PartRule;

/// Route properties between two ranks, equal at both.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanRoute {
    pub parts: PartRule,
    /// True if arrivals keep the post order: one lane counts all writes.
    pub ordered: bool,
}

impl PlanRoute {
    /// A rank's route to itself, which no plan uses.
    pub const SELF: PlanRoute = PlanRoute { parts: PartRule::WHOLE, ordered: true };
}

/// Bytes per element in staging memory that is kept in float32.
pub(crate) const WIDE_BYTES: u64 = 4;

/// Plan arguments that are equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkShape {
    /// Elements in the chunk's vector.
    pub elements: u64,
    pub element_bytes: u64,
    /// The input is copied to staging memory first.
    pub staged_input: bool,
    /// True if staging memory has float32 for 8-bit or 16-bit elements in the caller's memory: the staged input and the
    /// results are converted, and no step accesses the caller's memory.
    pub is_wide: bool,
}

/// Maximum number of lanes from one rank to another.
pub(crate) fn pair_lanes(schedule: &impl Schedule) -> u32 {
    let mut most = 0;
    let mut of_rank: HashSet<(u32, u32)> = HashSet::new();
    let mut toward: HashMap<u32, u32> = HashMap::new();
    for rank in (0..schedule.ranks()).map(Rank) {
        of_rank.clear();
        toward.clear();
        for index in 0..schedule.len(rank) {
            if let Op::Write { to, lane, .. } = schedule.op(rank, index)
                && of_rank.insert((to.0, lane))
            {
                let lanes = toward.entry(to.0).or_default();
                *lanes += 1;
                most = most.max(*lanes);
            }
        }
    }
    most
}

/// Builds the plan for rank `me`.
pub(crate) fn plan<S: Schedule>(
    schedule: &S,
    me: Rank,
    shape: ChunkShape,
    route: impl Fn(u32) -> PlanRoute,
) -> Plan {
    let ChunkShape { elements, element_bytes, staged_input, is_wide } = shape;
    let layout = Layout::new(schedule, elements, element_bytes, staged_input);
    let mut builder = Builder {
        layout: &layout,
        schedule,
        me,
        plan: Plan::default(),
        sent: HashMap::new(),
        received: HashMap::new(),
        landed: Vec::new(),
    };
    if staged_input {
        builder.stage_input();
    }
    for index in 0..schedule.len(me) {
        builder.add(schedule.op(me, index), &route);
    }
    builder.results();
    let Builder { mut plan, landed, .. } = builder;
    plan.is_wide = is_wide;
    if !is_wide {
        direct_results::redirect(&mut plan, schedule.collective(), me.0, &landed);
    }
    plan
}

struct Builder<'a, 's, S> {
    layout: &'a Layout<'s, S>,
    schedule: &'a S,
    me: Rank,
    plan: Plan,
    /// Lanes toward each rank so far.
    sent: HashMap<u32, PairLanes>,
    /// Raises by each rank, in write order.
    received: HashMap<u32, Vec<Arrival>>,
    /// Staging memory bytes that each wait covers first.
    landed: Vec<Vec<Range<u64>>>,
}

/// Lane count for a pair so far, by schedule lane.
#[derive(Default)]
pub(super) struct PairLanes(HashMap<u32, u16>);

impl PairLanes {
    /// Fabric lane for a schedule lane.
    pub fn lane(&mut self, lane: u32, ordered: bool) -> u16 {
        let next = self.0.len() as u16;
        if ordered { 0 } else { *self.0.entry(lane).or_insert(next) }
    }
}

/// A peer's write to this rank.
struct Arrival {
    /// Schedule lane.
    lane: u32,
    /// Fabric lane.
    fabric_lane: u16,
    /// Fabric lane raises up to this write.
    raises: u64,
    /// Written bytes in staging memory; empty once a wait covers them.
    targets: Vec<Range<u64>>,
}

impl<S: Schedule> Builder<'_, '_, S> {
    fn stage_input(&mut self) {
        let (shares, bytes) = self.layout.shares(self.me, Buffer::Input);
        for share in 0..shares {
            let target = Place::Staging(self.layout.staged_input() + u64::from(share) * bytes);
            let source = Place::Input { share, offset: 0 };
            if bytes > 0 {
                self.plan.staged.push(Piece { source, target, bytes });
            }
        }
    }

    fn add(&mut self, op: Op, route: &impl Fn(u32) -> PlanRoute) {
        match op {
            Op::Write { to, source, target, lane, .. } => {
                self.write(to, source, target, lane, route(to.0))
            }
            Op::Wait { from, lane, count } => self.wait(from, lane, count, route(from.0)),
            Op::Drain { to } => self.plan.steps.push(Step::Drain { to: to.0 }),
            Op::Reduce { source, target } => {
                for Piece { source, target, bytes } in self.local(source, target) {
                    let a = self.take_copy(target, bytes).unwrap_or(target);
                    self.plan.steps.push(Step::Combine { target, a, b: source, bytes });
                }
            }
            Op::Copy { source, target } => {
                let pieces = self.local(source, target);
                self.plan.steps.extend(pieces.into_iter().map(Step::Copy));
            }
        }
    }

    /// Removes the last step but waits if it copies exactly to `target`; returns its source. A sum that begins with a
    /// copy reads the source instead: only waits stand between, which access no memory on this rank.
    fn take_copy(&mut self, target: Place, bytes: u64) -> Option<Place> {
        let is_wait = |step: &Step| matches!(step, Step::Wait { .. });
        let last = self.plan.steps.iter().rposition(|step| !is_wait(step))?;
        match self.plan.steps[last] {
            Step::Copy(copy) if copy.target == target && copy.bytes == bytes => {
                self.plan.steps.remove(last);
                Some(copy.source)
            }
            _ => None,
        }
    }

    fn local(&self, source: Span, target: Span) -> Vec<Piece> {
        self.layout.pieces(self.me, source, self.me, target)
    }

    fn write(&mut self, to: Rank, source: Span, target: Span, lane: u32, route: PlanRoute) {
        let begin = self.plan.pieces.len() as u32;
        self.plan.pieces.extend(self.layout.pieces(self.me, source, to, target));
        let pieces = begin..self.plan.pieces.len() as u32;
        let reads_input = |piece: &Piece| matches!(piece.source, Place::Input { .. });
        self.plan.reads_input |= self.plan.pieces[begin as usize..].iter().any(reads_input);
        if !self.sent.contains_key(&to.0) {
            self.plan.targets.push(to.0);
        }
        let lane = self.sent.entry(to.0).or_default().lane(lane, route.ordered);
        self.plan.steps.push(Step::Write { to: to.0, lane, pieces });
    }

    fn wait(&mut self, from: Rank, lane: u32, count: u32, route: PlanRoute) {
        if !self.received.contains_key(&from.0) {
            let arrivals = self.arrivals(from, route);
            self.received.insert(from.0, arrivals);
            self.plan.sources.push(from.0);
        }
        let Some(arrivals) = self.received.get_mut(&from.0) else { return };
        let of_lane = arrivals.iter_mut().filter(|arrival| arrival.lane == lane);
        let (mut last, mut landed) = (None, Vec::new());
        for arrival in of_lane.take(count as usize) {
            last = Some((arrival.fabric_lane, arrival.raises));
            landed.append(&mut arrival.targets);
        }
        let Some((lane, raises)) = last else { return };
        self.landed.push(landed);
        self.plan.steps.push(Step::Wait { from: from.0, lane, raises });
    }

    /// Writes from `from` to this rank, in operation order.
    fn arrivals(&self, from: Rank, route: PlanRoute) -> Vec<Arrival> {
        let mut arrivals = Vec::new();
        let mut lanes = PairLanes::default();
        let mut raised: HashMap<u16, u64> = HashMap::new();
        for index in 0..self.schedule.len(from) {
            let Op::Write { to, source, target, lane, .. } = self.schedule.op(from, index) else {
                continue;
            };
            if to != self.me {
                continue;
            }
            let fabric_lane = lanes.lane(lane, route.ordered);
            let pieces = self.layout.pieces(from, source, to, target);
            let raises = raised.entry(fabric_lane).or_default();
            *raises += route.parts.count(pieces.iter().map(|piece| piece.bytes));
            let targets = pieces.iter().filter_map(|piece| match piece.target {
                Place::Staging(start) => Some(start..start + piece.bytes),
                _ => None,
            });
            let targets = targets.collect();
            arrivals.push(Arrival { lane, fabric_lane, raises: *raises, targets });
        }
        arrivals
    }

    /// Copies from the output blocks to the caller's memory.
    fn results(&mut self) {
        for index in self.layout.output_blocks(self.me) {
            let (source, bytes) = self.layout.block(self.me, Buffer::Output, index);
            let target = self.layout.user(self.me, Buffer::Output, index);
            match self.plan.results.last_mut() {
                _ if bytes == 0 => {}
                Some(last)
                    if last.source.after(last.bytes) == source
                        && last.target.after(last.bytes) == target =>
                {
                    last.bytes += bytes;
                }
                _ => self.plan.results.push(Piece { source, target, bytes }),
            }
        }
    }
}

/// Share count in the caller's input and output at a rank.
pub(crate) fn user_shares(collective: Collective, ranks: u32, rank: Rank) -> (u32, u32) {
    match collective {
        Collective::AllReduce => (1, 1),
        Collective::ReduceScatter => (ranks, 1),
        Collective::AllGather => (1, ranks),
        Collective::AllToAll => (ranks, ranks),
        Collective::Broadcast { root } => (u32::from(root == rank), 1),
    }
}
