//! Chunk layout: where schedule blocks lie in user memory and in a channel's staging memory.
//!
//! A call on a vector is divided into chunks; to the schedule, each chunk is a whole vector. A buffer with shares (such
//! as a reduce-scatter input) contributes the same slice from each share, so that a chunk with `N` shares, `u` elements
//! each, lies at the whole share's stride in user memory. Staging memory holds, from the start: the output, the
//! scratch, and an input copy if the plan has one.

use crate::op::{Buffer, Collective, Rank, Span};
use crate::schedule::{Schedule, block_start};
use std::ops::Range;

/// Area alignment in staging memory, in bytes: a cache line.
const AREA_ALIGNMENT: u64 = 64;

/// Byte position at one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Offset in this chunk share in the caller's input.
    Input { share: u32, offset: u64 },
    /// Offset in this chunk share in the caller's output.
    Output { share: u32, offset: u64 },
    /// Offset in the channel's staging memory.
    Staging(u64),
}

impl Place {
    /// The position `bytes` behind this one.
    pub fn after(self, bytes: u64) -> Place {
        match self {
            Place::Input { share, offset } => Place::Input { share, offset: offset + bytes },
            Place::Output { share, offset } => Place::Output { share, offset: offset + bytes },
            Place::Staging(offset) => Place::Staging(offset + bytes),
        }
    }
}

/// Equal memory segments at two ranks, or at one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub source: Place,
    pub target: Place,
    pub bytes: u64,
}

/// Layout for one chunk on all ranks.
#[derive(Clone, Debug)]
pub(crate) struct Layout<'a, S> {
    schedule: &'a S,
    /// Elements in the chunk's vector.
    elements: u64,
    element_bytes: u64,
    /// Input is read from a copy in staging memory.
    staged_input: bool,
    scratch: u64,
    slot_bytes: u64,
    staged: u64,
    total: u64,
}

impl<'a, S: Schedule> Layout<'a, S> {
    pub fn new(
        schedule: &'a S,
        elements: u64,
        element_bytes: u64,
        staged_input: bool,
    ) -> Layout<'a, S> {
        let slots = (0..schedule.ranks()).map(|rank| schedule.scratch_blocks(Rank(rank))).max();
        let slot_bytes = elements.div_ceil(u64::from(schedule.blocks())) * element_bytes;
        let scratch = (elements * element_bytes).next_multiple_of(AREA_ALIGNMENT);
        let scratch_bytes = slot_bytes * u64::from(slots.unwrap_or(0));
        let staged = (scratch + scratch_bytes).next_multiple_of(AREA_ALIGNMENT);
        let input = if staged_input { elements * element_bytes } else { 0 };
        let total = (staged + input).next_multiple_of(AREA_ALIGNMENT);
        Layout {
            schedule,
            elements,
            element_bytes,
            staged_input,
            scratch,
            slot_bytes,
            staged,
            total,
        }
    }

    /// Staging memory bytes on the rank that needs most.
    pub fn staging_bytes(&self) -> u64 {
        self.total
    }

    /// Offset to the input copy in staging memory.
    pub fn staged_input(&self) -> u64 {
        self.staged
    }

    /// Share count in a caller's buffer, and chunk bytes in each.
    pub fn shares(&self, rank: Rank, buffer: Buffer) -> (u32, u64) {
        let blocks = self.schedule.buffer_blocks(rank, buffer);
        if blocks == 0 {
            return (0, 0);
        }
        let first = self.schedule.first_block(rank, buffer);
        let bytes = self.start(first + blocks) - self.start(first);
        match self.share_blocks(buffer) {
            Some(share) => (blocks / share, bytes / u64::from(blocks / share)),
            None => (1, bytes),
        }
    }

    /// Blocks per share, if the buffer consists of shares.
    fn share_blocks(&self, buffer: Buffer) -> Option<u32> {
        let (blocks, ranks) = (self.schedule.blocks(), self.schedule.ranks());
        let has_shares = matches!(
            (self.schedule.collective(), buffer),
            (Collective::ReduceScatter | Collective::AllToAll, Buffer::Input)
                | (Collective::AllGather | Collective::AllToAll, Buffer::Output)
        );
        has_shares.then_some(blocks / ranks)
    }

    /// First byte for a block in the chunk's vector.
    fn start(&self, block: u32) -> u64 {
        block_start(self.elements, self.schedule.blocks(), block) * self.element_bytes
    }

    /// Block offset in a rank's packed buffer, and block bytes.
    fn packed(&self, rank: Rank, buffer: Buffer, index: u32) -> (u64, u64) {
        let first = self.schedule.first_block(rank, buffer);
        let begin = self.start(first + index);
        (begin - self.start(first), self.start(first + index + 1) - begin)
    }

    /// Block position in the caller's buffer at `rank`.
    pub fn user(&self, rank: Rank, buffer: Buffer, index: u32) -> Place {
        let (offset, _) = self.packed(rank, buffer, index);
        let (share, offset) = match self.share_blocks(buffer) {
            Some(blocks) => {
                let share = index / blocks;
                (share, offset - self.start(share * blocks))
            }
            None => (0, offset),
        };
        match buffer {
            Buffer::Input => Place::Input { share, offset },
            _ => Place::Output { share, offset },
        }
    }

    /// Block position and bytes.
    pub fn block(&self, rank: Rank, buffer: Buffer, index: u32) -> (Place, u64) {
        if buffer == Buffer::Scratch {
            let offset = self.scratch + u64::from(index) * self.slot_bytes;
            return (Place::Staging(offset), self.slot_bytes);
        }
        let (offset, bytes) = self.packed(rank, buffer, index);
        let place = match buffer {
            Buffer::Input if self.staged_input => Place::Staging(self.staged + offset),
            Buffer::Input => self.user(rank, buffer, index),
            _ => Place::Staging(offset),
        };
        (place, bytes)
    }

    /// Segments in a transfer from `source` at `from` to `target` at `to`; adjacent blocks are joined. Sender and
    /// receiver compute the same segments.
    pub fn pieces(&self, from: Rank, source: Span, to: Rank, target: Span) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for index in 0..source.blocks.min(target.blocks) {
            let (source, available) = self.block(from, source.buffer, source.first + index);
            let (target, room) = self.block(to, target.buffer, target.first + index);
            let bytes = available.min(room);
            match pieces.last_mut() {
                _ if bytes == 0 => {}
                Some(last)
                    if last.source.after(last.bytes) == source
                        && last.target.after(last.bytes) == target =>
                {
                    last.bytes += bytes;
                }
                _ => pieces.push(Piece { source, target, bytes }),
            }
        }
        pieces
    }

    /// Output blocks at `rank`, by index.
    pub fn output_blocks(&self, rank: Rank) -> Range<u32> {
        0..self.schedule.buffer_blocks(rank, Buffer::Output)
    }
}
