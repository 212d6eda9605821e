//! Every block of every rank: what it holds, who wrote it and who has read it since.

use super::order::Use;
use crate::op::{Buffer, Rank};
use crate::schedule::Schedule;

/// What a block holds: block `block` of the vector, summed over the ranks of a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Value {
    pub(super) set: u32,
    pub(super) block: u32,
}

/// A block of an output or of scratch. Inputs are never written, so nothing is kept of them.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    pub(super) value: Option<Value>,
    pub(super) writer: Option<Use>,
    /// The latest in a chain of reads since the last write.
    reader: u32,
}

const NONE: u32 = u32::MAX;

pub(super) struct Memory {
    slots: Vec<Slot>,
    /// Where each rank's output begins in `slots`; its scratch follows.
    first: Vec<usize>,
    output: usize,
    /// Reads, each with the one before it.
    reads: Vec<(Use, u32)>,
}

impl Memory {
    /// The slots that a schedule needs.
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

    fn place(&self, rank: u32, buffer: Buffer, block: u32) -> usize {
        let base = match buffer {
            Buffer::Input => unreachable!("inputs have no slots"),
            Buffer::Output => 0,
            Buffer::Scratch => self.output,
        };
        self.first[rank as usize] + base + block as usize
    }

    pub(super) fn slot(&self, rank: u32, buffer: Buffer, block: u32) -> &Slot {
        &self.slots[self.place(rank, buffer, block)]
    }

    /// Notes that a block is read.
    pub(super) fn read(&mut self, rank: u32, buffer: Buffer, block: u32, used: Use) {
        let place = self.place(rank, buffer, block);
        let slot = &mut self.slots[place];
        if let Some((Use::Local(before), _)) = self.reads.get_mut(slot.reader as usize)
            && let Use::Local(now) = used
        {
            // The later of two operations of one rank ends last.
            *before = now;
            return;
        }
        self.reads.push((used, slot.reader));
        slot.reader = self.reads.len() as u32 - 1;
    }

    /// Notes that a block is written. Whoever used it before must have ended.
    pub(super) fn write(&mut self, rank: u32, buffer: Buffer, block: u32, used: Use, value: Value) {
        let place = self.place(rank, buffer, block);
        self.slots[place] = Slot { value: Some(value), writer: Some(used), reader: NONE };
    }

    /// The reads of a block since it was written, the latest first.
    pub(super) fn readers(&self, slot: &Slot) -> impl Iterator<Item = Use> {
        let mut next = slot.reader;
        std::iter::from_fn(move || {
            let &(used, before) = self.reads.get(next as usize)?;
            next = before;
            Some(used)
        })
    }
}
