//! Packed dispatch writes: tokens and records are copied into one page before the write, and the records are
//! copied out after they arrive. [`crate::plan::packing`] has the rule.

use super::Channel;
use crate::area::Area;
use crate::plan::packing;
use std::ops::Range;
use weft_fabric::{Page, RegionKey};

impl Channel {
    /// Copies `rows` to the staging buffer in the layout that they have from `first_slot` on: tokens, then
    /// records. Both the input and the staging buffer exist if routes pack rows and while a round dispatches.
    pub(super) fn pack(
        &mut self,
        rows: Range<usize>,
        destination: RegionKey,
        first_slot: usize,
    ) -> Option<Page> {
        let (input, staging) = (self.input.as_ref()?, self.areas.staging()?);
        let token_bytes = self.shape.token_bytes();
        let slot = self.shape.sizes().extent(Area::Tokens).stride as usize;
        let (length, begin) = (packing::packed_bytes(&self.shape, rows.len()), self.staged);
        let mut at = begin as usize;
        for row in rows.clone() {
            let from = self.plan.token_of(row) * token_bytes;
            input.memory.copy_to(from, staging.memory(), at, token_bytes);
            at += slot;
        }
        let from = self.areas.offset(Area::SendMetadata, rows.start) as usize;
        let records = (begin + length) as usize - at;
        self.areas.memory().copy_to(from, staging.memory(), at, records);
        self.staged = (begin + length).next_multiple_of(packing::ALIGNMENT);
        Some(Page {
            source: staging.key(),
            source_offset: begin,
            destination,
            destination_offset: self.areas.offset(Area::Tokens, first_slot),
            length,
        })
    }

    /// Copies packed rows' records from behind the tokens to the metadata area.
    pub(super) fn unpack_records(&self, rank: u32) {
        let Some(peer) = self.peer(rank) else { return };
        let record = self.shape.sizes().extent(Area::Metadata).stride as usize;
        let (rows, private) =
            (self.counts.rows(rank, self.shape.config().rank), self.shape.config().private_rows);
        let memory = self.areas.memory();
        for (first, count) in [(0, rows.min(private)), (private, rows.saturating_sub(private))] {
            if count > 0 && packing::is_packed(peer.parts, count as usize) {
                let slot = self.receive.slot(rank, first) as usize;
                let from = self.areas.offset(Area::Tokens, slot + count as usize) as usize;
                let to = self.areas.offset(Area::Metadata, slot) as usize;
                memory.copy_to(from, memory, to, count as usize * record);
            }
        }
    }
}
