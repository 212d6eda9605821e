//! How many bytes a span has.

use weft_collectives::{Buffer, Rank, Schedule, Span};

use crate::error::Error;

/// Turns spans of a schedule's blocks into bytes of a vector of a given length, without the wide divisions
/// of [`Schedule::span_bytes`] where every block has the same length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    bytes: u64,
    /// The length of every block, if all have the same.
    block: Option<u64>,
}

impl Sizes {
    pub fn new(schedule: &impl Schedule, bytes: u64) -> Result<Sizes, Error> {
        let blocks = u64::from(schedule.blocks());
        if bytes > 1 << 50 {
            return Err(Error::field("bytes", bytes, "at most 2^50"));
        }
        let block = bytes.is_multiple_of(blocks).then_some(bytes / blocks);
        Ok(Sizes { bytes, block })
    }

    pub fn local(&self, schedule: &impl Schedule, rank: u32, source: Span, target: Span) -> u64 {
        self.write(schedule, rank, source, rank, target)
    }

    /// What goes from `source` at one rank to `target` at another: the shorter of the two.
    pub fn write(
        &self,
        schedule: &impl Schedule,
        from: u32,
        source: Span,
        to: u32,
        target: Span,
    ) -> u64 {
        if let Some(block) = self.block {
            return block * u64::from(source.blocks);
        }
        // A slot of scratch is as long as the longest block: the other side says how much it is.
        match (source.buffer, target.buffer) {
            (Buffer::Scratch, _) => schedule.span_bytes(Rank(to), target, self.bytes),
            _ => schedule.span_bytes(Rank(from), source, self.bytes),
        }
    }
}
