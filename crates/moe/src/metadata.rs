//! The record that travels with each row: which of the destination's experts want it, and how much,
//! and the scales of its elements, if they have any.
//!
//! Little-endian, aligned to 4 bytes: a count (u32), then for each expert its number within the
//! destination's block (u16), the top-k slot it stood in (u16) and the router's weight (float32).
//! Scales begin and end at a multiple of 16 bytes. Records have the same length throughout, whatever
//! their count.

use crate::error::Error;
use crate::plan::SendPlan;
use crate::rows::{Area, RowsMut};

/// The most top-k slots that a record can name.
pub(crate) const MOST_SLOTS: u64 = 1 << 16;
/// The most experts of one rank that a record can name.
pub(crate) const MOST_LOCAL_EXPERTS: u64 = 1 << 16;

const COUNT: usize = 4;
const ENTRY: usize = 8;

/// Scales begin and end at multiples of this many bytes, so that a processor may load them as vectors.
pub(crate) const ALIGNMENT: usize = 16;

/// Bytes of a record of at most `pairs` experts and so many bytes of scales.
pub(crate) fn bytes(pairs: u128, scale_bytes: u128) -> u128 {
    let entries = COUNT as u128 + ENTRY as u128 * pairs;
    if scale_bytes == 0 {
        return entries;
    }
    entries.next_multiple_of(ALIGNMENT as u128) + scale_bytes.next_multiple_of(ALIGNMENT as u128)
}

/// One expert that wants the row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entry {
    /// The expert's number within its rank's block.
    pub expert: u16,
    /// The top-k slot.
    pub slot: u16,
    /// The router's weight.
    pub weight: f32,
}

/// Writes the records of `rows` of the plan, the first into row 0 of `out`. `scales` holds those of
/// every token of the batch, `[tokens, blocks]`; nothing if tokens have none.
///
/// # Errors
/// [`Error::TooFewRows`] or [`Error::RowLength`] if `out` was not made for this plan's shape;
/// [`Error::WrongLength`] if `scales` does not fit it.
pub fn pack(
    plan: &SendPlan,
    rows: std::ops::Range<usize>,
    scales: &[u8],
    mut out: RowsMut<'_>,
) -> Result<(), Error> {
    check_scales(plan, scales)?;
    out.require(Area::SendMetadata, rows.len(), plan.metadata_bytes())?;
    let (scale_bytes, in_record) = (plan.shape().scale_bytes(), plan.shape().scales_in_record());
    for (index, row) in rows.enumerate() {
        let (entries, rest) = out.row(index).split_at_mut(in_record.start);
        encode(entries, plan.entries(row));
        let first = plan.token_of(row) * scale_bytes;
        rest[..scale_bytes].copy_from_slice(&scales[first..first + scale_bytes]);
    }
    Ok(())
}

/// Refuses scales that are not those of the plan's tokens.
pub(crate) fn check_scales(plan: &SendPlan, scales: &[u8]) -> Result<(), Error> {
    let (expected, given) = (plan.tokens() * plan.shape().scale_bytes(), scales.len());
    if given != expected {
        return Err(Error::WrongLength { what: "the scales' bytes", expected, given });
    }
    Ok(())
}

fn encode(record: &mut [u8], entries: impl Iterator<Item = Entry>) {
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

/// A record as a peer wrote it: nothing in it is to be believed yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    pub count: u32,
    entries: &'a [[u8; ENTRY]],
}

impl<'a> Record<'a> {
    /// The record in `row`; callers have checked its length.
    pub(crate) fn read(row: &'a [u8]) -> Record<'a> {
        let (count, rest) = row.split_at(COUNT);
        let count = count.try_into().map_or(0, u32::from_le_bytes);
        Record { count, entries: rest.as_chunks().0 }
    }

    /// The entries that the count names, as far as the record reaches.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry> + 'a {
        self.entries.iter().take(self.count as usize).map(|[a, b, c, d, w @ ..]| Entry {
            expert: u16::from_le_bytes([*a, *b]),
            slot: u16::from_le_bytes([*c, *d]),
            weight: f32::from_le_bytes(*w),
        })
    }
}
