//! Wire layout of headers and metadata records: byte sizes and count limits.

use crate::shape::config::Config;

/// Bytes of the fixed part of a header, before the counts.
pub(crate) const HEADER_FIXED: usize = 24;

/// Bytes of a header.
pub(crate) fn header_bytes(config: &Config) -> u128 {
    HEADER_FIXED as u128 + 4 * (u128::from(config.ranks) + u128::from(config.experts))
}

/// Maximum number of top-k slots of a record.
pub(crate) const MOST_SLOTS: u64 = 1 << 16;
/// Maximum number of experts of one rank in a record.
pub(crate) const MOST_LOCAL_EXPERTS: u64 = 1 << 16;

/// Bytes of the number of entries of a record.
pub(crate) const RECORD_COUNT: usize = 4;
/// Bytes of an entry of a record.
pub(crate) const RECORD_ENTRY: usize = 8;

/// Scales begin and end at multiples of this number of bytes, for vector loads.
pub(crate) const RECORD_ALIGNMENT: usize = 16;

/// Bytes of a record of at most `pairs` experts and `scale_bytes` bytes of scales.
pub(crate) fn record_bytes(pairs: u128, scale_bytes: u128) -> u128 {
    let entries = RECORD_COUNT as u128 + RECORD_ENTRY as u128 * pairs;
    if scale_bytes == 0 {
        return entries;
    }
    entries.next_multiple_of(RECORD_ALIGNMENT as u128)
        + scale_bytes.next_multiple_of(RECORD_ALIGNMENT as u128)
}

/// Flag bit of numbers in the send plan.
pub(crate) const MARK: u32 = 1 << 31;
/// Maximum number of experts, and of ids in a batch, that leaves the flag bit free.
pub(crate) const MOST_MARKED: u64 = (MARK - 1) as u64;
