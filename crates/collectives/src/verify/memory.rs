//! Blocks on all ranks: value, last write, and reads since.

use super::happens_before::BlockUse;
use crate::op::{Buffer, Rank};
use crate::schedule::Schedule;

/// Block value: vector block `block`, summed over a rank set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Value {
    pub(super) set: u32,
    pub(super) block: u32,
}

/// Output or scratch block. Inputs are read-only and have no slots.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    pub(super) value: Option<Value>,
    pub(super) writer: Option<BlockUse>,
    /// Latest read since the last write, the head in a linked list.
    reader: u32,
}

const NONE: u32 = u32::MAX;

pub(super) struct Memory {
    slots: Vec<Slot>,
    /// First output slot on each rank; the scratch follows.
    first: Vec<usize>,
    output: usize,
    /// Reads, each with the predecessor's index.
    reads: Vec<(BlockUse, u32)>,
}

impl Memory {
    /// Slot count for a schedule.
    pub(super) fn slots(schedule: &impl Schedule) -> u64 {
        (0..schedule.ranks())
            .map(Rank)
            .map(|rank| {
                u64::from(schedule.buffer_blocks(rank, Buffer::Output))
                    + u64::from(schedule.scratch_blocks(rank))
            })
            .sum()
    }

    pub(super) fn new(schedule: &impl Schedule) -> Memory {
        let output = schedule.buffer_blocks(Rank(0), Buffer::Output) as usize;
        let mut first = Vec::new();
        let mut total = 0;
        for rank in 0..schedule.ranks() {
            first.push(total);
            total += output + schedule.scratch_blocks(Rank(rank)) as usize;
        }
        let empty = Slot { value: None, writer: None, reader: NONE };
        Memory { slots: vec![empty; total], first, output, reads: Vec::new() }
    }

    fn index(&self, rank: u32, buffer: Buffer, block: u32) -> usize {
        let base = match buffer {
            Buffer::Input => unreachable!("inputs have no slots"),
            Buffer::Output => 0,
            Buffer::Scratch => self.output,
        };
        self.first[rank as usize] + base + block as usize
    }

    pub(super) fn slot(&self, rank: u32, buffer: Buffer, block: u32) -> &Slot {
        &self.slots[self.index(rank, buffer, block)]
    }

    /// Records a block read.
    pub(super) fn read(&mut self, rank: u32, buffer: Buffer, block: u32, used: BlockUse) {
        let index = self.index(rank, buffer, block);
        let slot = &mut self.slots[index];
        if let Some((BlockUse::Local(before), _)) = self.reads.get_mut(slot.reader as usize)
            && let BlockUse::Local(now) = used
        {
            // Between two operations on one rank, the later ends last.
            *before = now;
            return;
        }
        self.reads.push((used, slot.reader));
        slot.reader = self.reads.len() as u32 - 1;
    }

    /// Records a block write. All earlier uses must have ended.
    pub(super) fn write(
        &mut self,
        rank: u32,
        buffer: Buffer,
        block: u32,
        used: BlockUse,
        value: Value,
    ) {
        let index = self.index(rank, buffer, block);
        self.slots[index] = Slot { value: Some(value), writer: Some(used), reader: NONE };
    }

    /// Block reads since the last write, the latest first.
    pub(super) fn readers(&self, slot: &Slot) -> impl Iterator<Item = BlockUse> {
        let mut next = slot.reader;
        std::iter::from_fn(move || {
            let &(used, before) = self.reads.get(next as usize)?;
            next = before;
            Some(used)
        })
    }
}
