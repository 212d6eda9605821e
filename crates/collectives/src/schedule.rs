//! A schedule as a value, and what its operations mean.
//!
//! # Memory
//! Each rank has an input, an output and scratch. The vector of `n` units (bytes, or elements when they are
//! added up) has `B` near-equal blocks: block `b` covers `n*b/B .. n*(b+1)/B`, rounded down. Input and output
//! hold blocks packed, all of them or a share, as the [`Collective`] says; a slot of scratch is as long as the
//! longest block. An operation on spans acts block by block, on the shorter of the two lengths. So that
//! nothing is lost, a block of the output only ever holds that block of the vector.
//!
//! # Time
//! A rank does its operations in order. What happens when:
//!
//! - A write is *posted* when the rank comes to it. It is read from its source, byte by byte, at any time
//!   between the post and its arrival. Its bytes appear at the target at any time in between, in any order.
//!   When all are there the lane rises. Each write rises its lane exactly once.
//! - Two writes may arrive in any order, also on one lane, also from one rank. So a wait for `count` rises
//!   means these writes and no others only if no later one of that lane can have been posted by then.
//! - A wait ends some time after its lane has risen often enough. From then on all bytes of the writes that
//!   it counted are visible to the waiter, and the sources of these writes have been read.
//! - A drain ends some time after the sources of the writes to that peer have been read.
//! - Copy and reduce read and write at any time between their start and their end.
//!
//! So one thing *happens before* another if it comes earlier at the same rank, or is a write's post and the
//! other the wait that counts it, or by a chain of these. Two uses of a block, of which one writes it, have
//! to be ordered in this sense: the first must have ended (for a write: by a wait that counts it, or, for its
//! source, by a drain) before the second starts. [`verify`](crate::verify()) proves it.
//!
//! # Begin and end
//! A rank may be written to before it has started: who runs a schedule gives output and scratch to its peers
//! first. A rank is done after its last operation, once its writes have drained. Every write has been waited
//! for by then, so nobody touches its memory any more, and all lanes are at counts that all know. Memory and
//! lanes may be used for the next round once every peer that writes to it is known to be done with this one.

use crate::op::{Buffer, Collective, Op, Rank, Span};

/// Who does what, by random access: each call takes constant time and allocates nothing, so that a schedule
/// of millions of writes is never stored.
pub trait Schedule {
    /// The name of the algorithm.
    fn name(&self) -> &str;

    /// What it computes.
    fn collective(&self) -> Collective;

    /// The number of ranks; at least 1.
    fn ranks(&self) -> u32;

    /// The number of blocks that the vector is cut into; at least 1.
    fn blocks(&self) -> u32;

    /// The number of slots of scratch that `rank` needs; none unless said otherwise.
    fn scratch_blocks(&self, _rank: Rank) -> u32 {
        0
    }

    /// The number of steps; every write's step is below it.
    fn steps(&self) -> u32;

    /// The number of lanes from a rank to another; every write's lane is below it. One for each step unless
    /// said otherwise.
    fn lanes(&self) -> u32 {
        self.steps()
    }

    /// The number of operations of `rank`.
    fn len(&self, rank: Rank) -> u32;

    /// An operation of `rank`; `index` is below [`len`](Schedule::len).
    fn op(&self, rank: Rank, index: u32) -> Op;

    /// The number of blocks of one of `rank`'s buffers.
    fn buffer_blocks(&self, rank: Rank, buffer: Buffer) -> u32 {
        match buffer {
            Buffer::Input => input_blocks(self.collective(), self.ranks(), self.blocks(), rank),
            Buffer::Output => output_blocks(self.collective(), self.ranks(), self.blocks()),
            Buffer::Scratch => self.scratch_blocks(rank),
        }
    }

    /// The block of the vector that stands first in an input or output: 0 unless `rank` has only a share.
    fn first_block(&self, rank: Rank, buffer: Buffer) -> u32 {
        match (self.collective(), buffer) {
            (Collective::ReduceScatter, Buffer::Output)
            | (Collective::AllGather, Buffer::Input) => rank.0 * (self.blocks() / self.ranks()),
            _ => 0,
        }
    }

    /// The bytes that `rank` moves when it writes, copies or adds `span` of a vector of `bytes` bytes. For
    /// scratch, whose slots hold any block, they are those of the longest blocks.
    fn span_bytes(&self, rank: Rank, span: Span, bytes: u64) -> u64 {
        let blocks = self.blocks();
        if span.buffer == Buffer::Scratch {
            return bytes.div_ceil(u64::from(blocks)) * u64::from(span.blocks);
        }
        let first = self.first_block(rank, span.buffer) + span.first;
        block_start(bytes, blocks, first + span.blocks) - block_start(bytes, blocks, first)
    }

    /// The bytes of a write by `from`, of a vector of `bytes` bytes: those of the shorter of its spans.
    fn write_bytes(&self, from: Rank, source: Span, to: Rank, target: Span, bytes: u64) -> u64 {
        self.span_bytes(from, source, bytes).min(self.span_bytes(to, target, bytes))
    }
}

/// Where block `block` of `blocks` begins in a vector of `units` units: `units*block/blocks`, rounded down.
pub fn block_start(units: u64, blocks: u32, block: u32) -> u64 {
    (u128::from(units) * u128::from(block) / u128::from(blocks)) as u64
}

pub(crate) fn input_blocks(collective: Collective, ranks: u32, blocks: u32, rank: Rank) -> u32 {
    match collective {
        Collective::AllGather => blocks / ranks,
        Collective::Broadcast { root } if root != rank => 0,
        _ => blocks,
    }
}

pub(crate) fn output_blocks(collective: Collective, ranks: u32, blocks: u32) -> u32 {
    match collective {
        Collective::ReduceScatter => blocks / ranks,
        _ => blocks,
    }
}
