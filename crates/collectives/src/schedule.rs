//! Schedule trait and operation semantics.
//!
//! # Memory
//! Each rank has an input, an output and scratch. The vector of `n` units (bytes, or elements when they are summed)
//! has `B` near-equal blocks: block `b` covers `n*b/B .. n*(b+1)/B`, rounded down. Input and output hold packed blocks,
//! all or a share, as defined by the [`Collective`]; a scratch slot is as long as the longest block. An operation on
//! spans acts block by block, on the shorter length. An output block only ever holds the same vector block, so no data
//! is cut off.
//!
//! # Time
//! A rank executes operations in order:
//!
//! - A write is *posted* when the rank reaches it. The source is read, byte by byte, at any time between the post and
//!   the arrival. The bytes appear at the target at any time in between, in any order. Once all have arrived, the lane
//!   is raised; each write raises a lane exactly once.
//! - Writes arrive in any order, even on one lane and from one rank. A wait for `count` raises therefore identifies the
//!   writes only if no later write on that lane can have been posted by then.
//! - A wait ends some time after the lane was raised `count` times. From then on all bytes in the counted writes are
//!   visible to the waiter, and the sources have been read.
//! - A drain ends some time after the sources for the writes to that peer have been read.
//! - Copy and reduce read and write at any time between start and end.
//!
//! An event *happens before* another (Lamport, 1978) if it is earlier at the same rank, or is a write's post and the
//! other the wait that counts it, or by transitivity. Two uses that share a block, if one writes, must be ordered in
//! this sense: the first must have ended (a write: by a wait that counts it or, for the source, by a drain) before the
//! second starts. [`verify`](crate::verify()) proves it.
//!
//! # Start and end
//! Writes to a rank may arrive before it has started, so executors expose output and scratch to the peers beforehand. A
//! rank is done after the last operation, once all writes have drained. Every write has been waited for by then, so the
//! memory is unused, and all lanes have known counts. Memory and lanes may be used for the next round once all peers
//! that write to the rank are known to be done with this round.

use crate::op::{Buffer, Collective, Op, Rank, Span};

/// Operations on all ranks, by random access: each call takes O(1) time without allocation, so that schedules with
/// millions of writes need no storage.
pub trait Schedule {
    /// Algorithm name.
    fn name(&self) -> &str;

    /// Computed collective.
    fn collective(&self) -> Collective;

    /// Rank count; at least 1.
    fn ranks(&self) -> u32;

    /// Number of blocks in the vector; at least 1.
    fn blocks(&self) -> u32;

    /// Scratch slot count on `rank`; default 0.
    fn scratch_blocks(&self, _rank: Rank) -> u32 {
        0
    }

    /// Step count; every write's step is below it.
    fn steps(&self) -> u32;

    /// Number of lanes from one rank to another; every write's lane is below it. Default: one for each step.
    fn lanes(&self) -> u32 {
        self.steps()
    }

    /// Operation count on `rank`.
    fn len(&self, rank: Rank) -> u32;

    /// Operation `index` on `rank`, below [`len`](Schedule::len).
    fn op(&self, rank: Rank, index: u32) -> Op;

    /// Block count in a buffer on `rank`.
    fn buffer_blocks(&self, rank: Rank, buffer: Buffer) -> u32 {
        match buffer {
            Buffer::Input => input_blocks(self.collective(), self.ranks(), self.blocks(), rank),
            Buffer::Output => output_blocks(self.collective(), self.ranks(), self.blocks()),
            Buffer::Scratch => self.scratch_blocks(rank),
        }
    }

    /// First vector block in an input or output: 0 unless `rank` has only a share.
    fn first_block(&self, rank: Rank, buffer: Buffer) -> u32 {
        match (self.collective(), buffer) {
            (Collective::ReduceScatter, Buffer::Output)
            | (Collective::AllGather, Buffer::Input) => rank.0 * (self.blocks() / self.ranks()),
            _ => 0,
        }
    }

    /// Bytes in `span` at `rank`, for a vector of `bytes` bytes. For scratch, whose slots hold any block, the bytes
    /// in the longest blocks.
    fn span_bytes(&self, rank: Rank, span: Span, bytes: u64) -> u64 {
        let blocks = self.blocks();
        if span.buffer == Buffer::Scratch {
            return bytes.div_ceil(u64::from(blocks)) * u64::from(span.blocks);
        }
        let first = self.first_block(rank, span.buffer) + span.first;
        block_start(bytes, blocks, first + span.blocks) - block_start(bytes, blocks, first)
    }

    /// Bytes in a write by `from`, for a vector of `bytes` bytes: the shorter span's bytes.
    fn write_bytes(&self, from: Rank, source: Span, to: Rank, target: Span, bytes: u64) -> u64 {
        self.span_bytes(from, source, bytes).min(self.span_bytes(to, target, bytes))
    }
}

/// Start of block `block` among `blocks` in a vector of `units` units: `units*block/blocks`, rounded down. For example,
/// 10 units in 4 blocks start at 0, 2, 5 and 7.
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
