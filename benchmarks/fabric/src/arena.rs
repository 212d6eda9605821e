//! Benchmark memory: a source and an inbox on each rank, divided into slots that are used in turn.
//!
//! Together they are several times as large as the last-level cache, so that a slot is no longer cached at
//! the next use. A source's bytes are a function of rank and offset and never change; a checked inbox slot
//! is overwritten, so that bytes from an earlier use are not taken for current ones.

use weft_fabric::Memory;

/// Longest message; at least two fit.
pub const LONGEST: usize = 64 << 20;
/// XOR between words in the two ranks' sources.
const DIFFERENCE: u64 = 0x5bd1_e995_7f4a_7c15;
const LINE: usize = 64;

/// Bytes in a source and in an inbox. All four regions together are about four times this machine's
/// last-level cache, or four times 256 MiB if that is unknown.
pub fn region_bytes() -> usize {
    last_level_cache().unwrap_or(LONGEST * 4).next_multiple_of(LONGEST).max(2 * LONGEST)
}

/// Bytes in the first core's largest cache.
fn last_level_cache() -> Option<usize> {
    let sizes = (0..8).filter_map(|index| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        let text = std::fs::read_to_string(path).ok()?;
        Some(text.trim().strip_suffix('K')?.parse::<usize>().ok()? << 10)
    });
    sizes.max()
}

/// Fills a rank's source.
pub fn fill_source(source: &Memory, rank: u32) {
    let mut word = [0; 8 * 512];
    for offset in (0..source.len()).step_by(word.len()) {
        for (index, bytes) in word.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&source_word(rank, offset / 8 + index).to_le_bytes());
        }
        source.copy_in(offset, &word);
    }
}

fn source_word(rank: u32, index: usize) -> u64 {
    // The highest bit is set on both ranks, so that no word is zero; scrubbed words are zero.
    let word = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 << 63;
    if rank == 0 { word } else { word ^ (DIFFERENCE & !(1 << 63)) }
}

/// True if `length` bytes at `offset` equal the other rank's source; overwrites them.
pub fn check_and_scrub(inbox: &Memory, source: &Memory, offset: usize, length: usize) -> bool {
    // SAFETY: the message was counted and its slot is not written again before the next barrier; sources
    // are never written.
    let (arrived, ours) = unsafe { (inbox.bytes(offset, length), source.bytes(offset, length)) };
    let difference = DIFFERENCE & !(1 << 63);
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    let (whole, whole_ours) = (arrived.chunks_exact(8), ours.chunks_exact(8));
    let (rest, rest_ours) = (word(whole.remainder()), word(whole_ours.remainder()));
    let rest_mask = (1u64 << (length % 8 * 8)) - 1;
    let differs =
        whole.zip(whole_ours).fold((rest ^ rest_ours ^ difference) & rest_mask, |sum, (a, b)| {
            sum | (word(a) ^ word(b) ^ difference)
        });
    let right = differs == 0;
    inbox.fill(offset, length, 0);
    right
}

/// Message slots in turn, the same on both ranks.
pub struct Slots {
    next: usize,
    bytes: usize,
}

impl Slots {
    /// Slots in regions with `bytes` bytes.
    pub fn new(bytes: usize) -> Slots {
        Slots { next: 0, bytes }
    }

    /// Offsets for the next `count` messages with `length` bytes, all distinct.
    pub fn take(&mut self, count: usize, length: usize) -> Vec<usize> {
        let stride = length.next_multiple_of(LINE);
        let (first, slots) = (self.next.div_ceil(stride), self.bytes / stride);
        assert!(count <= slots, "{count} messages with {length} bytes do not fit");
        self.next = (first + count) % slots * stride;
        (first..first + count).map(|slot| slot % slots * stride).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_byte_anywhere_is_detected_and_checked_bytes_are_scrubbed() {
        let (source, inbox) = (Memory::shared(4096).unwrap(), Memory::shared(4096).unwrap());
        let theirs = Memory::shared(4096).unwrap();
        fill_source(&source, 0);
        fill_source(&theirs, 1);
        assert!(!check_and_scrub(&inbox, &source, 0, 8), "no message had arrived");
        for wrong in [None, Some(64), Some(64 + 999)] {
            theirs.copy_to(64, &inbox, 64, 1000);
            if let Some(at) = wrong {
                inbox.fill(at, 1, 0);
            }
            assert_eq!(check_and_scrub(&inbox, &source, 64, 1000), wrong.is_none());
            assert!(!check_and_scrub(&inbox, &source, 64, 1000), "the slot was not scrubbed");
        }
        theirs.copy_to(64, &inbox, 128, 64);
        assert!(!check_and_scrub(&inbox, &source, 128, 64), "the message is at a wrong offset");
    }

    #[test]
    fn slots_are_distinct_within_a_batch_and_wrap_around() {
        let mut slots = Slots::new(1024);
        assert_eq!(slots.take(3, 100), [0, 128, 256]);
        assert_eq!(slots.take(4, 200), [512, 768, 0, 256]);
        assert_eq!(slots.take(1, 1024), [0]);
        assert_eq!(slots.take(3, 320), [0, 320, 640]);
        assert_eq!(slots.take(2, 320), [0, 320]);
    }
}
