//! Plans for algorithm `direct-read`: a proved schedule, executed by reads.
//!
//! A write in the schedule becomes a signal, and the target reads the source in place when it waits for that signal.
//! The source stays unchanged until the answer, and the target accesses the bytes only after the wait, so each read
//! order is one in which the schedule's writes may land, for which it is proved.
//!
//! Results are folded straight into the caller's output, which may be the input: a rank then overwrites only input
//! elements that it reads itself, or whose sum it has received from the rank that reads them.

use super::layout::{Layout, Piece, Place};
use super::plan::{ChunkShape, PairLanes, PlanRoute};
use super::step::{Plan, Step, Term};
use crate::op::{Buffer, Op, Rank, Span};
use crate::schedule::Schedule;
use std::collections::{BTreeMap, HashMap};

/// Staging memory bytes for each rank: the rank's addresses, see [`super::reads`].
pub(super) const SLOT_BYTES: u64 = 64;
/// Bytes that the addresses take.
pub(super) const ADDRESS_BYTES: u64 = 32;

/// Builds the plan for rank `me`; `None` for a schedule that writes scratch to a peer, or overwrites what peers read.
pub(super) fn plan<S: Schedule>(
    schedule: &S,
    me: Rank,
    shape: ChunkShape,
    route: impl Fn(u32) -> PlanRoute,
) -> Option<Plan> {
    let layout = Layout::new(schedule, shape.elements, shape.element_bytes, false);
    let mut builder = Builder {
        layout: &layout,
        schedule,
        me,
        plan: Plan { is_read: true, ..Plan::default() },
        cells: BTreeMap::new(),
        sent: HashMap::new(),
        received: HashMap::new(),
    };
    for index in 0..schedule.len(me) {
        builder.add(index, &route)?;
    }
    builder.place_all()?;
    Some(builder.plan)
}

/// Block in a buffer on this rank.
type Cell = (Buffer, u32);

/// Peer signal.
struct Arrival {
    lane: u32,
    fabric_lane: u16,
    raises: u64,
    source: Span,
    target: Span,
    is_new: bool,
}

struct Builder<'a, 's, S> {
    layout: &'a Layout<'s, S>,
    schedule: &'a S,
    me: Rank,
    plan: Plan,
    /// Blocks whose value is known, but not yet in memory.
    cells: BTreeMap<Cell, Vec<Term>>,
    sent: HashMap<u32, PairLanes>,
    received: HashMap<u32, Vec<Arrival>>,
}

impl<S: Schedule> Builder<'_, '_, S> {
    fn add(&mut self, index: u32, route: &impl Fn(u32) -> PlanRoute) -> Option<()> {
        match self.schedule.op(self.me, index) {
            Op::Write { to, source, lane, .. } => self.signal(to, source, lane, route(to.0)),
            Op::Wait { from, lane, count } => {
                let targets = self.wait(from, lane, count, route(from.0))?;
                targets.into_iter().try_for_each(|cell| self.place_unless_summed(cell, index))
            }
            Op::Copy { source, target } => {
                for (from, to) in pairs(source, target) {
                    let terms = self.value(from)?;
                    self.cells.insert(to, terms);
                    self.place_unless_summed(to, index)?;
                }
                Some(())
            }
            Op::Reduce { source, target } => {
                for (from, to) in pairs(source, target) {
                    let terms = self.value(from)?;
                    self.cells.get_mut(&to)?.extend(terms);
                }
                Some(())
            }
            Op::Drain { .. } => None,
        }
    }

    /// Signals that the blocks in `source` may be read.
    fn signal(&mut self, to: Rank, source: Span, lane: u32, route: PlanRoute) -> Option<()> {
        for cell in cells(source) {
            match cell.0 {
                Buffer::Input => {}
                Buffer::Output => self.place(cell)?,
                Buffer::Scratch => return None,
            }
        }
        let begin = self.plan.pieces.len() as u32;
        if !self.sent.contains_key(&to.0) {
            self.plan.targets.push(to.0);
            let slot = Place::Staging(u64::from(self.me.0) * SLOT_BYTES);
            self.plan.pieces.push(Piece { source: slot, target: slot, bytes: ADDRESS_BYTES });
        }
        let pieces = begin..self.plan.pieces.len() as u32;
        let lane = self.sent.entry(to.0).or_default().lane(lane, route.ordered);
        self.plan.steps.push(Step::Write { to: to.0, lane, pieces });
        Some(())
    }

    /// Waits for signals; returns the blocks that they define.
    fn wait(&mut self, from: Rank, lane: u32, count: u32, route: PlanRoute) -> Option<Vec<Cell>> {
        if !self.received.contains_key(&from.0) {
            let arrivals = self.arrivals(from, route);
            // The first signal carries the addresses.
            if arrivals.first()?.lane != lane {
                return None;
            }
            self.received.insert(from.0, arrivals);
            self.plan.sources.push(from.0);
        }
        let of_lane = self.received.get_mut(&from.0)?.iter_mut().filter(|one| one.lane == lane);
        let (mut step, mut targets) = (None, Vec::new());
        for arrival in of_lane.take(count as usize) {
            let (lane, raises) = (arrival.fabric_lane, arrival.raises);
            step = Some(Step::Wait { from: from.0, lane, raises });
            if std::mem::take(&mut arrival.is_new) {
                for (source, target) in pairs(arrival.source, arrival.target) {
                    let place = self.layout.user(from, source.0, source.1);
                    if source.0 == Buffer::Scratch {
                        return None;
                    }
                    self.cells.insert(target, vec![Term { rank: from.0, place }]);
                    targets.push(target);
                }
            }
        }
        self.plan.steps.push(step?);
        Some(targets)
    }

    /// Writes from `from` to this rank, in operation order.
    fn arrivals(&self, from: Rank, route: PlanRoute) -> Vec<Arrival> {
        let (mut arrivals, mut lanes) = (Vec::new(), PairLanes::default());
        let mut raised: HashMap<u16, u64> = HashMap::new();
        for index in 0..self.schedule.len(from) {
            let op = self.schedule.op(from, index);
            let Op::Write { to, source, target, lane, .. } = op else { continue };
            if to != self.me {
                continue;
            }
            let fabric_lane = lanes.lane(lane, route.ordered);
            let raises = raised.entry(fabric_lane).or_default();
            let address = arrivals.is_empty().then_some(ADDRESS_BYTES);
            *raises += route.parts.count(address);
            let raises = *raises;
            arrivals.push(Arrival { lane, fabric_lane, raises, source, target, is_new: true });
        }
        arrivals
    }

    /// Operands for a block's value.
    fn value(&self, cell: Cell) -> Option<Vec<Term>> {
        match self.cells.get(&cell) {
            Some(terms) => Some(terms.clone()),
            None if cell.0 == Buffer::Scratch => None,
            None => {
                let place = self.layout.user(self.me, cell.0, cell.1);
                Some(vec![Term { rank: self.me.0, place }])
            }
        }
    }

    /// Folds an output block into memory, unless an operation after `index` still adds to it.
    fn place_unless_summed(&mut self, cell: Cell, index: u32) -> Option<()> {
        let mut later =
            (index + 1..self.schedule.len(self.me)).map(|i| self.schedule.op(self.me, i));
        let is_summed = later.any(|op| {
            matches!(op, Op::Reduce { source, target }
                if pairs(source, target).any(|(from, to)| from == cell || to == cell))
        });
        if is_summed { Some(()) } else { self.place(cell) }
    }

    fn place(&mut self, cell: Cell) -> Option<()> {
        if cell.0 != Buffer::Output {
            return Some(());
        }
        // A block without pending operands is in memory already.
        let Some(terms) = self.cells.remove(&cell) else { return Some(()) };
        let target = self.layout.user(self.me, cell.0, cell.1);
        let (_, bytes) = self.layout.block(self.me, cell.0, cell.1);
        if bytes > 0 {
            let begin = self.plan.terms.len() as u32;
            self.plan.terms.extend(terms);
            let terms = begin..self.plan.terms.len() as u32;
            self.plan.steps.push(Step::Fold { target, terms, bytes });
        }
        Some(())
    }

    fn place_all(&mut self) -> Option<()> {
        let pending: Vec<Cell> = self.cells.keys().copied().collect();
        pending.into_iter().try_for_each(|cell| self.place(cell))
    }
}

fn cells(span: Span) -> impl Iterator<Item = Cell> {
    (span.first..span.first + span.blocks).map(move |block| (span.buffer, block))
}

fn pairs(source: Span, target: Span) -> impl Iterator<Item = (Cell, Cell)> {
    cells(source).zip(cells(target))
}
