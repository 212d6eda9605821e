//! Wire layout for headers and metadata records: byte sizes and count limits.

use crate::shape::config::Config;

/// Size of a header's fixed part, before the counts, in bytes.
pub(crate) const HEADER_FIXED: usize = 24;

/// Header size in bytes, for example 1304 with 64 ranks and 256 experts.
pub(crate) fn header_bytes(config: &Config) -> u128 {
    HEADER_FIXED as u128 + 4 * (u128::from(config.ranks) + u128::from(config.experts))
}

/// Maximum number of top-k slots in a record.
pub(crate) const MOST_SLOTS: u64 = 1 << 16;
/// Maximum number of experts on one rank in a record.
pub(crate) const MOST_LOCAL_EXPERTS: u64 = 1 << 16;

/// Size of a record's entry count in bytes.
pub(crate) const RECORD_COUNT: usize = 4;
/// Size of a record entry in bytes.
pub(crate) const RECORD_ENTRY: usize = 8;

/// Scales begin and end at multiples of this many bytes, for vector loads.
pub(crate) const RECORD_ALIGNMENT: usize = 16;

/// Size of a record with at most `pairs` experts and `scale_bytes` scale bytes.
pub(crate) fn record_bytes(pairs: u128, scale_bytes: u128) -> u128 {
    let entries = RECORD_COUNT as u128 + RECORD_ENTRY as u128 * pairs;
    if scale_bytes == 0 {
        return entries;
    }
    entries.next_multiple_of(RECORD_ALIGNMENT as u128)
        + scale_bytes.next_multiple_of(RECORD_ALIGNMENT as u128)
}

/// Flag bit in send plan numbers.
pub(crate) const MARK: u32 = 1 << 31;
/// Maximum number of experts, and of ids in a batch, that leaves the flag bit free.
pub(crate) const MOST_MARKED: u64 = (MARK - 1) as u64;
