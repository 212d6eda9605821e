//! Span bytes.

use weft_collectives::{Buffer, Rank, Schedule, Span};

use crate::error::Error;

/// Converts spans into bytes in a vector; avoids the 128-bit divisions in [`Schedule::span_bytes`] for blocks with
/// equal length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpanSizes {
    bytes: u64,
    /// Length for every block, if equal.
    block: Option<u64>,
}

impl SpanSizes {
    pub fn new(schedule: &impl Schedule, bytes: u64) -> Result<SpanSizes, Error> {
        let blocks = u64::from(schedule.blocks());
        if bytes > 1 << 50 {
            return Err(Error::field("bytes", bytes, "at most 2^50"));
        }
        let block = bytes.is_multiple_of(blocks).then_some(bytes / blocks);
        Ok(SpanSizes { bytes, block })
    }

    pub fn local(&self, schedule: &impl Schedule, rank: u32, source: Span, target: Span) -> u64 {
        self.write(schedule, rank, source, rank, target)
    }

    /// Bytes from `source` at one rank to `target` at another: the shorter one.
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
        // A scratch slot has the longest block's length: the other side has the actual length.
        match (source.buffer, target.buffer) {
            (Buffer::Scratch, _) => schedule.span_bytes(Rank(to), target, self.bytes),
            _ => schedule.span_bytes(Rank(from), source, self.bytes),
        }
    }
}
