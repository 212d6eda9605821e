//! Schedule parts: ranks, collectives, memory spans, and the five operations.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Maximum rank count in a schedule.
pub const MAX_RANKS: u32 = 1 << 24;

/// Rank in a group, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Collective operation among `N` ranks on a vector with `B` blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    /// Input and output have `B` blocks: each output block is the sum of that block over all ranks.
    AllReduce,
    /// The input has `B` blocks, the output at rank `r` the `B/N` blocks from `r*B/N`, summed over all ranks. `N`
    /// divides `B`.
    ReduceScatter,
    /// The input at rank `r` is the `B/N` blocks from `r*B/N`, the output all `B`. `N` divides `B`.
    AllGather,
    /// The output on every rank, the root included, is the root's input. Other ranks have no input.
    Broadcast {
        /// Rank that has the vector.
        root: Rank,
    },
    /// Input and output have `B` blocks, `B/N` for each rank: share `d` in the input at rank `s` becomes share `s` in
    /// the output at rank `d`. `N` divides `B`, and all blocks have the same length.
    AllToAll,
}

impl Collective {
    /// True if contributions are summed.
    pub fn reduces(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::ReduceScatter)
    }

    /// True if the rank count must divide `blocks`.
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

/// A rank's buffer, by use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Buffer {
    /// The rank's contribution. Read-only.
    Input,
    /// The rank's result. Undefined at the start.
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

/// Consecutive blocks in one buffer, for example `out[0..2]`. Never empty in a valid schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// Buffer.
    pub buffer: Buffer,
    /// First block, counted within the buffer.
    pub first: u32,
    /// Block count.
    pub blocks: u32,
}

impl Span {
    /// Input blocks.
    pub const fn input(first: u32, blocks: u32) -> Span {
        Span { buffer: Buffer::Input, first, blocks }
    }

    /// Output blocks.
    pub const fn output(first: u32, blocks: u32) -> Span {
        Span { buffer: Buffer::Output, first, blocks }
    }

    /// Scratch slots.
    pub const fn scratch(first: u32, blocks: u32) -> Span {
        Span { buffer: Buffer::Scratch, first, blocks }
    }

    /// One block in a buffer.
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

/// Rank operation. A rank executes operations in order, each after the one before has ended.
///
/// The module [`schedule`](crate::schedule) defines the memory and time semantics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Op {
    /// Posts a counted write, without waiting. Once all bytes have arrived, this rank's `lane` at `to` is raised by
    /// one.
    Write {
        /// Destination; another rank.
        to: Rank,
        /// Local blocks to read.
        source: Span,
        /// Blocks to write at the destination; as many as in `source`, not in the input.
        target: Span,
        /// This rank's lane to raise at `to`.
        lane: u32,
        /// Step in which the write happens if all ranks proceed in lockstep; `contention` counts by it.
        step: u32,
    },
    /// Waits until the `lane` from `from` at this rank was raised `count` times since the start.
    Wait {
        /// Rank that writes.
        from: Rank,
        /// Lane from `from` at this rank.
        lane: u32,
        /// Raises in total; at least 1.
        count: u32,
    },
    /// Waits until the sources for all writes that this rank posted to `to` may be overwritten. It does not imply that
    /// they have arrived.
    Drain {
        /// Peer.
        to: Rank,
    },
    /// `target += source`, block by block, both on this rank.
    Reduce {
        /// Blocks to add.
        source: Span,
        /// Blocks to add to.
        target: Span,
    },
    /// `target = source`, block by block, both on this rank.
    Copy {
        /// Blocks to read.
        source: Span,
        /// Blocks to overwrite.
        target: Span,
    },
}

impl Op {
    /// Copy from the whole input to the output: the schedule for a one-rank group.
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

/// A rank's operation, with its position; names an error location such as
/// `rank 1, operation 1 (reduce in[0] into out[0])`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpLocation {
    /// Rank that executes the operation.
    pub rank: Rank,
    /// Index among the rank's operations, from 0.
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
