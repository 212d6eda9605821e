//! Schedule trait, and the semantics of its operations.
//!
//! # Memory
//! Each rank has an input, an output and scratch. The vector of `n` units (bytes, or elements when they are
//! summed) has `B` near-equal blocks: block `b` covers `n*b/B .. n*(b+1)/B`, rounded down. Input and output
//! hold packed blocks, all of them or a share, as defined by the [`Collective`]; a slot of scratch is as long
//! as the longest block. An operation on spans acts block by block, on the shorter of the two lengths. A block
//! of the output only ever holds that block of the vector, so no data is cut off.
//!
//! # Time
//! A rank executes its operations in order:
//!
//! - A write is *posted* when the rank reaches it. Its source is read, byte by byte, at any time between the
//!   post and the arrival. Its bytes appear at the target at any time in between, in any order. Once all have
//!   arrived, the lane is raised; each write raises its lane exactly once.
//! - Writes arrive in any order, even on one lane and from one rank. A wait for `count` raises therefore
//!   identifies its writes only if no later write of that lane can have been posted by then.
//! - A wait ends some time after its lane was raised `count` times. From then on all bytes of the counted writes
//!   are visible to the waiter, and the sources of these writes have been read.
//! - A drain ends some time after the sources of the writes to that peer have been read.
//! - Copy and reduce read and write at any time between their start and their end.
//!
//! An event *happens before* another (Lamport, 1978) if it is earlier at the same rank, or is the post of a write
//! and the other the wait that counts it, or by transitivity. Two uses of a block, of which one writes, must be
//! ordered in this sense: the first must have ended (a write: by a wait that counts it or, for its source, by a
//! drain) before the second starts. [`verify`](crate::verify()) proves it.
//!
//! # Start and end
//! Writes to a rank may arrive before it has started, so executors expose output and scratch to the peers
//! beforehand. A rank is done after its last operation, once its writes have drained. Every write has been waited
//! for by then, so its memory is unused, and all lanes have known counts. Memory and lanes may be used for the next
//! round once all peers that write to the rank are known to be done with this round.

use crate::op::{Buffer, Collective, Op, Rank, Span};

/// Operations of all ranks, by random access: each call takes O(1) time without allocation, so that schedules of
/// millions of writes need no storage.
pub trait Schedule {
    /// Name of the algorithm.
    fn name(&self) -> &str;

    /// Computed collective.
    fn collective(&self) -> Collective;

    /// Number of ranks; at least 1.
    fn ranks(&self) -> u32;

    /// Number of blocks of the vector; at least 1.
    fn blocks(&self) -> u32;

    /// Number of scratch slots of `rank`; default 0.
    fn scratch_blocks(&self, _rank: Rank) -> u32 {
        0
    }

    /// Number of steps; the step of every write is below it.
    fn steps(&self) -> u32;

    /// Number of lanes from a rank to another; the lane of every write is below it. Default: one for each step.
    fn lanes(&self) -> u32 {
        self.steps()
    }

    /// Number of operations of `rank`.
    fn len(&self, rank: Rank) -> u32;

    /// Operation `index` of `rank`, below [`len`](Schedule::len).
    fn op(&self, rank: Rank, index: u32) -> Op;

    /// Number of blocks of a buffer of `rank`.
    fn buffer_blocks(&self, rank: Rank, buffer: Buffer) -> u32 {
        match buffer {
            Buffer::Input => input_blocks(self.collective(), self.ranks(), self.blocks(), rank),
            Buffer::Output => output_blocks(self.collective(), self.ranks(), self.blocks()),
            Buffer::Scratch => self.scratch_blocks(rank),
        }
    }

    /// First block of the vector in an input or output: 0 unless `rank` has a share only.
    fn first_block(&self, rank: Rank, buffer: Buffer) -> u32 {
        match (self.collective(), buffer) {
            (Collective::ReduceScatter, Buffer::Output)
            | (Collective::AllGather, Buffer::Input) => rank.0 * (self.blocks() / self.ranks()),
            _ => 0,
        }
    }

    /// Bytes of `span` at `rank`, of a vector of `bytes` bytes. For scratch, whose slots hold any block, the bytes of
    /// the longest blocks.
    fn span_bytes(&self, rank: Rank, span: Span, bytes: u64) -> u64 {
        let blocks = self.blocks();
        if span.buffer == Buffer::Scratch {
            return bytes.div_ceil(u64::from(blocks)) * u64::from(span.blocks);
        }
        let first = self.first_block(rank, span.buffer) + span.first;
        block_start(bytes, blocks, first + span.blocks) - block_start(bytes, blocks, first)
    }

    /// Bytes of a write by `from`, of a vector of `bytes` bytes: those of the shorter of its spans.
    fn write_bytes(&self, from: Rank, source: Span, to: Rank, target: Span, bytes: u64) -> u64 {
        self.span_bytes(from, source, bytes).min(self.span_bytes(to, target, bytes))
    }
}

/// Start of block `block` of `blocks` in a vector of `units` units: `units*block/blocks`, rounded down.
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
