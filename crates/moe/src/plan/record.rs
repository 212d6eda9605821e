//! A row's metadata record: the destination's experts that take it, the weights, and the element scales.

use crate::shape::wire::{RECORD_COUNT as COUNT, RECORD_ENTRY as ENTRY};

/// A row's expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecordEntry {
    /// Expert number within the rank's block.
    pub expert: u16,
    /// The top-k slot.
    pub slot: u16,
    /// The router's weight.
    pub weight: f32,
}

pub(crate) fn encode(record: &mut [u8], entries: impl Iterator<Item = RecordEntry>) {
    let (count, rest) = record.split_at_mut(COUNT);
    let mut written = 0u32;
    for (entry, out) in entries.zip(rest.as_chunks_mut::<ENTRY>().0) {
        out[0..2].copy_from_slice(&entry.expert.to_le_bytes());
        out[2..4].copy_from_slice(&entry.slot.to_le_bytes());
        out[4..8].copy_from_slice(&entry.weight.to_le_bytes());
        written += 1;
    }
    count.copy_from_slice(&written.to_le_bytes());
}

/// A record as a peer wrote it, unchecked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetadataRecord<'a> {
    pub count: u32,
    entries: &'a [[u8; ENTRY]],
}

impl<'a> MetadataRecord<'a> {
    /// The record in `row`, whose length callers have checked.
    pub(crate) fn read(row: &'a [u8]) -> MetadataRecord<'a> {
        let (count, rest) = row.split_at(COUNT);
        let count = count.try_into().map_or(0, u32::from_le_bytes);
        MetadataRecord { count, entries: rest.as_chunks().0 }
    }

    /// Entries up to the count or the record's end.
    pub(crate) fn entries(&self) -> impl Iterator<Item = RecordEntry> + 'a {
        self.entries.iter().take(self.count as usize).map(|[a, b, c, d, w @ ..]| RecordEntry {
            expert: u16::from_le_bytes([*a, *b]),
            slot: u16::from_le_bytes([*c, *d]),
            weight: f32::from_le_bytes(*w),
        })
    }
}
