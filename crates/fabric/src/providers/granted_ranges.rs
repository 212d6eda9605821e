//! Granted ranges: the region bytes that one rank grants to another.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges by region key. Both connection ends keep the same ones: the owner checks each frame, the writer
/// each post, so that an error is reported where it arises.
#[derive(Debug, Default)]
pub struct GrantedRanges {
    ranges: BTreeMap<u32, Vec<Range<u64>>>,
}

impl GrantedRanges {
    pub fn add(&mut self, key: u32, range: Range<u64>) {
        let ranges = self.ranges.entry(key).or_default();
        if !ranges.contains(&range) {
            ranges.push(range);
        }
    }

    pub fn remove(&mut self, key: u32) {
        self.ranges.remove(&key);
    }

    /// Checks that one grant contains all these bytes.
    ///
    /// # Errors
    /// Reason why none does.
    pub fn check(&self, key: u32, offset: u64, length: u64) -> Result<(), String> {
        let ranges =
            self.ranges.get(&key).ok_or_else(|| format!("region {key} was not granted"))?;
        let end = offset.checked_add(length);
        let end = end.ok_or_else(|| format!("{length} bytes at {offset} overflow"))?;
        if ranges.iter().any(|range| offset >= range.start && end <= range.end) {
            return Ok(());
        }
        Err(format!("bytes {offset}..{end} of region {key}: outside of the granted ranges"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bytes_within_one_grant_are_allowed() {
        let mut granted = GrantedRanges::default();
        granted.add(3, 10..20);
        granted.add(3, 40..50);
        for (offset, length) in [(10, 10), (12, 3), (49, 1), (40, 0), (20, 0)] {
            assert!(granted.check(3, offset, length).is_ok(), "{offset} {length}");
        }
        for (offset, length) in [(9, 2), (19, 2), (15, 30), (0, 0), (45, u64::MAX), (u64::MAX, 1)] {
            assert!(granted.check(3, offset, length).is_err(), "{offset} {length}");
        }
        assert!(granted.check(4, 10, 1).is_err());
        granted.remove(3);
        assert!(granted.check(3, 10, 1).is_err());
    }
}
