//! Plan steps.

use super::layout::{Piece, Place};
use std::ops::Range;

/// Plan step. A rank executes the steps in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Posts a counted write with these segments; a signal if there are none.
    Write { to: u32, lane: u16, pieces: Range<u32> },
    /// Waits until the lane from `from` was raised `raises` times in this round.
    Wait { from: u32, lane: u16, raises: u64 },
    /// Waits until the sources for all writes to `to` are free.
    Drain { to: u32 },
    /// `target = a op b`.
    Combine { target: Place, a: Place, b: Place, bytes: u64 },
    /// `target = source`.
    Copy(Piece),
    /// `target = term op term ...`, in term order. Peer terms are read in place.
    Fold { target: Place, terms: Range<u32>, bytes: u64 },
}

/// Fold operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Term {
    /// Rank whose memory it is.
    pub rank: u32,
    /// Place in the caller's input or output there.
    pub place: Place,
}

/// One rank's steps on chunks with one size.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub steps: Vec<Step>,
    /// Write segments.
    pub pieces: Vec<Piece>,
    /// Copies from staging memory to the caller's output at the end, and results that are already there.
    pub results: Vec<Piece>,
    /// Ranks that write to this one.
    pub sources: Vec<u32>,
    /// Ranks that this one writes to.
    pub targets: Vec<u32>,
    /// Copies from the input to staging memory at the start.
    pub staged: Vec<Piece>,
    /// True if a write reads the caller's input.
    pub reads_input: bool,
    /// Staging memory has float32: see [`super::plan::ChunkShape`].
    pub is_wide: bool,
    /// Fold operands.
    pub terms: Vec<Term>,
    /// Peers read the caller's memory in place, at addresses that the first write to each carries. The chunk is
    /// complete once they have answered by credits.
    pub is_read: bool,
}
