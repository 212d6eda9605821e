//! What a schedule is made of: ranks, spans of memory, and the five things a rank does.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A rank of the group, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a schedule computes. `N` is the number of ranks, `B` the number of blocks of the vector.
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
    /// The output of every rank, also the root's, is the input of the root. The others have no input.
    Broadcast {
        /// Who has the vector.
        root: Rank,
    },
    /// Input and output have `B` blocks, `B/N` for each rank: what rank `s` has for rank `d` comes to the
    /// place of `s` in the output of `d`. `B` is a multiple of `N`, and all blocks have the same length.
    AllToAll,
}

impl Collective {
    /// True when contributions are added up.
    pub fn reduces(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::ReduceScatter)
    }

    /// True when `blocks` has to be a multiple of the number of ranks.
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

/// A rank's memory, by its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Buffer {
    /// What the rank contributes. Nobody writes to it.
    Input,
    /// What the rank obtains. Undefined at the start.
    Output,
    /// Slots that each hold the longest block. Undefined at the start.
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
    /// Where.
    pub buffer: Buffer,
    /// The first block, counted within the buffer.
    pub first: u32,
    /// How many blocks.
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

/// One thing that a rank does. A rank does its operations in order, each after the one before is done.
///
/// The module [`schedule`](crate::schedule) says what may happen when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Op {
    /// Posts a counted write and goes on. When all of it has arrived, `lane` of this rank at `to` rises
    /// by one.
    Write {
        /// Who gets the bytes; another rank.
        to: Rank,
        /// What is read here.
        source: Span,
        /// What is written there; as many blocks, not of the input.
        target: Span,
        /// Which of this rank's lanes at `to` rises.
        lane: u32,
        /// The step it belongs to if all ranks went in step; `contention` counts by it.
        step: u32,
    },
    /// Waits until `lane` of `from` at this rank has risen `count` times since the start.
    Wait {
        /// Whose lane.
        from: Rank,
        /// Which of them.
        lane: u32,
        /// How many rises in all; at least 1.
        count: u32,
    },
    /// Waits until the sources of all writes that this rank posted to `to` may be overwritten. It says
    /// nothing about arrival.
    Drain {
        /// The peer.
        to: Rank,
    },
    /// `target += source`, block by block, both of this rank.
    Reduce {
        /// What is added.
        source: Span,
        /// To what.
        target: Span,
    },
    /// `target = source`, block by block, both of this rank.
    Copy {
        /// What is read.
        source: Span,
        /// What is overwritten.
        target: Span,
    },
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
