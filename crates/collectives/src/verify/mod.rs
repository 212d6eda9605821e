//! Verification: proof that a schedule computes the collective in every arrival order.
//!
//! The schedule is executed once, symbolically: a block holds the rank set whose contributions it sums. Which
//! operations end does not depend on the event order, as long as every wait counts only the intended writes, which is
//! checked; so one run finds all deadlocks. Vector clocks give the happens-before order: each block use is compared
//! with the last write and with the reads since. If all are ordered, every event order yields the values from this run.
//! Time: O(waits * ranks) for the clocks, plus the moved blocks; memory: O(blocks + writes).
//!
//! - `checks`: static operation checks, and the final output check
//! - `happens_before`: vector clocks; `lanes`: posted and counted writes
//! - `memory`: block contents and uses; `rank_sets`: interned rank sets

mod checks;
mod happens_before;
mod lanes;
mod memory;
mod rank_sets;

pub use checks::{MAX_SLOTS, MAX_VERIFIED_RANKS};
pub(crate) use checks::{header, operation};

use crate::error::{Error, at_most};
use crate::op::{Buffer, Collective, Op, OpLocation, Rank, Span};
use crate::schedule::Schedule;
use happens_before::{BlockUse, Clock, HappensBefore, OpStart, PostedWrite, join};
use lanes::{Lane, Lanes};
use memory::{Memory, Value};
use rank_sets::RankSets;
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;

/// Limit on the blocks that the operations in a verified schedule write, copy and add: a few JSON lines could request
/// hours of work.
pub const MAX_MOVES: u64 = 1 << 26;

/// Correctness proof, with the schedule size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Algorithm name.
    pub name: String,
    /// Computed collective.
    pub collective: Collective,
    /// Rank count.
    pub ranks: u32,
    /// Operations on all ranks.
    pub operations: u64,
    /// Writes among them.
    pub writes: u64,
    /// Maximum scratch on a rank, in blocks.
    pub scratch_blocks: u32,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Proof { name, collective, ranks, operations, writes, scratch_blocks } = self;
        write!(
            f,
            "{name} computes the {collective} of {ranks} ranks in every order of arrival: {operations} \
             operations, {writes} of them writes, at most {scratch_blocks} blocks of scratch"
        )
    }
}

/// Proves that `schedule` computes the collective in every event order that [`schedule`](crate::schedule) permits:
/// every output block has the value that the collective defines, with each contribution exactly once; no block is read
/// before it is written, or overwritten while it may be read or written; every wait ends, and counts the intended
/// writes.
///
/// Some correct schedules are rejected: schedules that store an output block at another position, even temporarily;
/// that add a contribution twice, even into an unused block; or whose steps do not increase along dependencies.
pub fn verify(schedule: &impl Schedule) -> Result<Proof, Error> {
    checks::header(schedule)?;
    checks::size(schedule)?;
    let mut run = SymbolicRun::new(schedule);
    while let Some(rank) = run.ready.pop_front() {
        run.advance(rank)?;
    }
    run.finish()
}

/// Symbolic execution. Ranks take turns; each advances until it has to wait.
struct SymbolicRun<'a, S> {
    schedule: &'a S,
    next: Vec<u32>,
    clocks: Vec<Clock>,
    /// Earliest valid step for the next write by each rank.
    steps: Vec<u32>,
    waiting: Vec<bool>,
    ready: VecDeque<u32>,
    lanes: Lanes,
    memory: Memory,
    order: HappensBefore,
    sets: RankSets,
    operations: u64,
    /// Blocks written, copied or added so far.
    moves: u64,
}

impl<'a, S: Schedule> SymbolicRun<'a, S> {
    fn new(schedule: &'a S) -> SymbolicRun<'a, S> {
        let ranks = schedule.ranks();
        let zero = Rc::new(vec![0; ranks as usize]);
        SymbolicRun {
            schedule,
            next: vec![0; ranks as usize],
            clocks: vec![zero; ranks as usize],
            steps: vec![0; ranks as usize],
            waiting: vec![false; ranks as usize],
            ready: (0..ranks).collect(),
            lanes: Lanes::default(),
            memory: Memory::new(schedule),
            order: HappensBefore::default(),
            sets: RankSets::new(ranks),
            operations: 0,
            moves: 0,
        }
    }

    fn at(&self, rank: u32, index: u32) -> OpLocation {
        OpLocation { rank: Rank(rank), index, op: self.schedule.op(Rank(rank), index) }
    }

    fn advance(&mut self, rank: u32) -> Result<(), Error> {
        let len = self.schedule.len(Rank(rank));
        self.waiting[rank as usize] = false;
        while self.next[rank as usize] < len {
            let at = self.at(rank, self.next[rank as usize]);
            checks::operation(self.schedule, at)?;
            if let Op::Write { source, .. } | Op::Reduce { source, .. } | Op::Copy { source, .. } =
                at.op
            {
                self.moves += u64::from(source.blocks);
                at_most("blocks that all operations move", self.moves, MAX_MOVES)?;
            }
            match at.op {
                Op::Write { source, target, .. } => self.write(at, source, target)?,
                Op::Wait { from, lane, count } => {
                    if !self.wait(at, from, lane, count)? {
                        self.waiting[rank as usize] = true;
                        return Ok(());
                    }
                }
                Op::Drain { to } => self.order.drain(rank, to.0, at.index),
                Op::Reduce { source, target } => self.combine(at, source, target, true)?,
                Op::Copy { source, target } => self.combine(at, source, target, false)?,
            }
            self.next[rank as usize] += 1;
            self.operations += 1;
        }
        Ok(())
    }

    fn write(&mut self, at: OpLocation, source: Span, target: Span) -> Result<(), Error> {
        let Op::Write { to, lane, step, .. } = at.op else { unreachable!("called for writes") };
        let rank = at.rank.0;
        if step < self.steps[rank as usize] {
            return Err(Error::StepOrder { at, reached: self.steps[rank as usize] - 1 });
        }
        self.steps[rank as usize] = step;
        let write = self.order.writes.len() as u32;
        for i in 0..source.blocks {
            let value = self.read(at, source.buffer, source.first + i, BlockUse::Source(write))?;
            self.store(at, to.0, target.buffer, target.first + i, BlockUse::Target(write), value)?;
        }
        let posted = PostedWrite { from: rank, index: at.index, to: to.0, step, waited: None };
        self.order.writes.push(posted);
        let clock = &self.clocks[rank as usize];
        let lane: &mut Lane = self.lanes.get(to.0, rank, lane);
        let start = OpStart { rank, index: at.index, clock };
        if let Some(waited) = lane.waited()
            && !start.after(to.0, waited)
        {
            return Err(Error::Ambiguous { at: self.at(to.0, waited), write: Box::new(at) });
        }
        lane.post(write, clock.clone());
        if self.waiting[to.0 as usize] {
            // The wait may be satisfied now.
            self.waiting[to.0 as usize] = false;
            self.ready.push_back(to.0);
        }
        Ok(())
    }

    /// Executes a wait; false if the rank has to wait.
    fn wait(&mut self, at: OpLocation, from: Rank, lane: u32, count: u32) -> Result<bool, Error> {
        let rank = at.rank.0;
        let lane = self.lanes.get(rank, from.0, lane);
        if count <= lane.counted() {
            return Ok(true);
        }
        if lane.posted() < count {
            return Ok(false);
        }
        if lane.posted() > count {
            let write = self.order.writes[lane.write(count) as usize];
            return Err(Error::Ambiguous { at, write: Box::new(self.at(write.from, write.index)) });
        }
        for (write, clock) in lane.count(at.index) {
            let write = &mut self.order.writes[write as usize];
            write.waited = Some(at.index);
            let step = &mut self.steps[rank as usize];
            *step = (*step).max(write.step + 1);
            join(&mut self.clocks[rank as usize], &clock, write.from, write.index);
        }
        Ok(true)
    }

    /// Executes a copy, or an addition.
    fn combine(
        &mut self,
        at: OpLocation,
        source: Span,
        target: Span,
        add: bool,
    ) -> Result<(), Error> {
        let used = BlockUse::Local(at.index);
        for i in 0..source.blocks {
            let mut value = self.read(at, source.buffer, source.first + i, used)?;
            if add {
                let sum = self.read(at, target.buffer, target.first + i, used)?;
                if sum.block != value.block {
                    let place = Span::block(target.buffer, target.first + i);
                    let (found, expected) = (value.block, sum.block);
                    return Err(Error::WrongBlock { at, place, found, expected });
                }
                value.set = self.sets.sum(sum.set, value.set).map_err(|contributor| {
                    Error::Twice { at, contributor: Rank(contributor), block: value.block }
                })?;
            }
            self.store(at, at.rank.0, target.buffer, target.first + i, used, value)?;
        }
        Ok(())
    }

    /// Reads a block on the executing rank.
    fn read(
        &mut self,
        at: OpLocation,
        buffer: Buffer,
        index: u32,
        used: BlockUse,
    ) -> Result<Value, Error> {
        let rank = at.rank.0;
        if buffer == Buffer::Input {
            return Ok(Value {
                set: rank,
                block: self.schedule.first_block(at.rank, buffer) + index,
            });
        }
        let slot = self.memory.slot(rank, buffer, index);
        let Some(value) = slot.value else {
            return Err(Error::Unwritten { at, block: Span::block(buffer, index) });
        };
        let start = OpStart { rank, index: at.index, clock: &self.clocks[rank as usize] };
        if let Some(writer) = slot.writer
            && !self.order.ended(writer, rank, &start)
        {
            return Err(self.race(
                at,
                "reads",
                rank,
                Span::block(buffer, index),
                writer,
                "written",
            ));
        }
        self.memory.read(rank, buffer, index, used);
        Ok(value)
    }

    /// Stores a value in a block at `owner`.
    fn store(
        &mut self,
        at: OpLocation,
        owner: u32,
        buffer: Buffer,
        index: u32,
        used: BlockUse,
        value: Value,
    ) -> Result<(), Error> {
        let place = Span::block(buffer, index);
        if buffer == Buffer::Output && self.schedule.collective() != Collective::AllToAll {
            let expected = self.schedule.first_block(Rank(owner), buffer) + index;
            if expected != value.block {
                return Err(Error::WrongBlock { at, place, found: value.block, expected });
            }
        }
        let rank = at.rank.0;
        let slot = self.memory.slot(owner, buffer, index);
        let start = OpStart { rank, index: at.index, clock: &self.clocks[rank as usize] };
        for reader in self.memory.readers(slot) {
            // An addition reads the target.
            if reader != used && !self.order.ended(reader, owner, &start) {
                return Err(self.race(at, "overwrites", owner, place, reader, "read"));
            }
        }
        if let Some(writer) = slot.writer
            && !self.order.ended(writer, owner, &start)
        {
            return Err(self.race(at, "writes", owner, place, writer, "written"));
        }
        self.memory.write(owner, buffer, index, used, value);
        Ok(())
    }

    fn race(
        &self,
        at: OpLocation,
        use_: &'static str,
        owner: u32,
        block: Span,
        other: BlockUse,
        done: &'static str,
    ) -> Error {
        let other = match other {
            BlockUse::Local(index) => self.at(owner, index),
            BlockUse::Source(write) | BlockUse::Target(write) => {
                let write = self.order.writes[write as usize];
                self.at(write.from, write.index)
            }
        };
        Error::Race { at, use_, owner: Rank(owner), block, other: Box::new(other), done }
    }

    fn finish(mut self) -> Result<Proof, Error> {
        let schedule = self.schedule;
        let ranks = schedule.ranks();
        if let Some(rank) = (0..ranks).find(|&rank| self.waiting[rank as usize]) {
            return Err(self.deadlock(rank));
        }
        if let Some(write) = self.order.writes.iter().find(|write| write.waited.is_none()) {
            let at = self.at(write.from, write.index);
            return Err(Error::Unwaited { write: at, to: Rank(write.to) });
        }
        for rank in (0..ranks).map(Rank) {
            for index in 0..schedule.buffer_blocks(rank, Buffer::Output) {
                let value = self.memory.slot(rank.0, Buffer::Output, index).value;
                checks::result(schedule, &self.sets, rank, index, value)?;
            }
        }
        Ok(Proof {
            name: schedule.name().to_owned(),
            collective: schedule.collective(),
            ranks,
            operations: self.operations,
            writes: self.order.writes.len() as u64,
            scratch_blocks: (0..ranks).map(|r| schedule.scratch_blocks(Rank(r))).max().unwrap_or(0),
        })
    }

    fn deadlock(&mut self, rank: u32) -> Error {
        let at = self.at(rank, self.next[rank as usize]);
        let Op::Wait { from, lane, count } = at.op else { unreachable!("only a wait blocks") };
        let risen = self.lanes.get(rank, from.0, lane).posted();
        let peer = self.waiting[from.0 as usize]
            .then(|| Box::new(self.at(from.0, self.next[from.0 as usize])));
        Error::Deadlock { at, from, risen, count, peer }
    }
}
