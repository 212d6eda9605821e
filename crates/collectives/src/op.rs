//! Parts of a schedule: ranks, collectives, spans of memory, and the five operations.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Largest number of ranks of a schedule.
pub const MAX_RANKS: u32 = 1 << 24;

/// Rank of a group, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Collective operation. `N` is the number of ranks, `B` the number of blocks of the vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    /// Input and output have `B` blocks: each output block is the sum of that block of all ranks.
    AllReduce,
    /// The input has `B` blocks, the output of rank `r` the `B/N` blocks from `r*B/N`, summed over all
    /// ranks. `B` is a multiple of `N`.
    ReduceScatter,
    /// The input of rank `r` is the `B/N` blocks from `r*B/N`, the output all `B`. `B` is a multiple of
    /// `N`.
    AllGather,
    /// The output of every rank, the root included, is the input of the root. Other ranks have no input.
    Broadcast {
        /// Rank that has the vector.
        root: Rank,
    },
    /// Input and output have `B` blocks, `B/N` for each rank: share `d` of the input of rank `s` becomes share `s`
    /// of the output of rank `d`. `B` is a multiple of `N`, and all blocks have the same length.
    AllToAll,
}

impl Collective {
    /// True if contributions are summed.
    pub fn reduces(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::ReduceScatter)
    }

    /// True if `blocks` must be a multiple of the number of ranks.
    pub fn shares(self) -> bool {
        matches!(self, Collective::ReduceScatter | Collective::AllGather | Collective::AllToAll)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Collective::AllReduce => f.write_str("all-reduce"),
            Collective::ReduceScatter => f.write_str("reduce-scatter"),
            Collective::AllGather => f.write_str("all-gather"),
            Collective::Broadcast { root } => write!(f, "broadcast from rank {root}"),
            Collective::AllToAll => f.write_str("all-to-all"),
        }
    }
}

/// Buffer of a rank, by its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Buffer {
    /// Contribution of the rank. Read-only.
    Input,
    /// Result of the rank. Undefined at the start.
    Output,
    /// Slots, each as long as the longest block. Undefined at the start.
    Scratch,
}

impl fmt::Display for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Buffer::Input => "in",
            Buffer::Output => "out",
            Buffer::Scratch => "scratch",
        })
    }
}

/// Consecutive blocks of one buffer. Never empty in a valid schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// Buffer.
    pub buffer: Buffer,
    /// First block, counted within the buffer.
    pub first: u32,
    /// Number of blocks.
    pub blocks: u32,
}

impl Span {
    /// Blocks of the input.
    pub const fn input(first: u32, blocks: u32) -> Span {
        Span { buffer: Buffer::Input, first, blocks }
    }

    /// Blocks of the output.
    pub const fn output(first: u32, blocks: u32) -> Span {
        Span { buffer: Buffer::Output, first, blocks }
    }

    /// Slots of the scratch.
    pub const fn scratch(first: u32, blocks: u32) -> Span {
        Span { buffer: Buffer::Scratch, first, blocks }
    }

    /// One block of a buffer.
    pub(crate) const fn block(buffer: Buffer, first: u32) -> Span {
        Span { buffer, first, blocks: 1 }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Span { buffer, first, blocks } = self;
        match blocks {
            1 => write!(f, "{buffer}[{first}]"),
            _ => write!(f, "{buffer}[{first}..{}]", u64::from(*first) + u64::from(*blocks)),
        }
    }
}

/// Operation of a rank. A rank executes its operations in order, each after the end of the one before.
///
/// The module [`schedule`](crate::schedule) defines their memory and time semantics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Op {
    /// Posts a counted write, without waiting. Once all its bytes have arrived, `lane` of this rank at `to` is
    /// raised by one.
    Write {
        /// Destination; another rank.
        to: Rank,
        /// Local blocks to read.
        source: Span,
        /// Blocks to write at the destination; as many as in `source`, not of the input.
        target: Span,
        /// Lane of this rank at `to` to raise.
        lane: u32,
        /// Step of the write if all ranks proceed in lockstep; `contention` counts by it.
        step: u32,
    },
    /// Waits until `lane` of `from` at this rank was raised `count` times since the start.
    Wait {
        /// Source of the writes.
        from: Rank,
        /// Lane of `from` at this rank.
        lane: u32,
        /// Total number of raises; at least 1.
        count: u32,
    },
    /// Waits until the sources of all writes that this rank posted to `to` may be overwritten. It does not imply
    /// their arrival.
    Drain {
        /// Peer.
        to: Rank,
    },
    /// `target += source`, block by block, both of this rank.
    Reduce {
        /// Blocks to add.
        source: Span,
        /// Blocks to add to.
        target: Span,
    },
    /// `target = source`, block by block, both of this rank.
    Copy {
        /// Blocks to read.
        source: Span,
        /// Blocks to overwrite.
        target: Span,
    },
}

impl Op {
    /// Copy of the whole input to the output: the schedule of a group of one.
    pub(crate) const fn copy_all(blocks: u32) -> Op {
        Op::Copy { source: Span::input(0, blocks), target: Span::output(0, blocks) }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Write { to, source, target, lane, .. } => {
                write!(f, "write {source} -> rank {to} {target}, lane {lane}")
            }
            Op::Wait { from, lane, count: 1 } => write!(f, "wait rank {from} lane {lane}"),
            Op::Wait { from, lane, count } => write!(f, "wait rank {from} lane {lane} x{count}"),
            Op::Drain { to } => write!(f, "drain rank {to}"),
            Op::Reduce { source, target } => write!(f, "reduce {source} into {target}"),
            Op::Copy { source, target } => write!(f, "copy {source} to {target}"),
        }
    }
}

/// Operation of a rank, with its position; names the location of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpLocation {
    /// Rank of the operation.
    pub rank: Rank,
    /// Index among the operations of the rank, from 0.
    pub index: u32,
    /// Operation.
    pub op: Op,
}

impl fmt::Display for OpLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, operation {} ({}", self.rank, self.index, self.op)?;
        if let Op::Write { step, .. } = self.op {
            write!(f, ", step {step}")?;
        }
        f.write_str(")")
    }
}
