//! Replays every target's corpus, and random changes of it, in the ordinary tests.

use super::TARGETS;
use std::path::Path;

const CHANGES: u64 = 20_000;

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit.max(1) as u64) as usize
    }

    /// Bits flipped, bytes set, a piece cut out, a piece of another one put in.
    fn change(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len() + 1);
            match self.below(5) {
                0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                1 if at < bytes.len() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                2 => bytes.truncate(at),
                3 => drop(bytes.drain(at..(at + self.below(9)).min(bytes.len()))),
                _ => {
                    let from = self.below(other.len() + 1);
                    let piece = &other[from..(from + self.below(17)).min(other.len())];
                    bytes.splice(at..at, piece.iter().copied());
                }
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "corpora are files, and isolated miri reads none")]
fn corpora_and_changes_of_them_break_no_promise() {
    for (name, target) in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
        let mut files: Vec<_> = std::fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        let corpus: Vec<Vec<u8>> = files.iter().map(|path| std::fs::read(path).unwrap()).collect();
        assert!(!corpus.is_empty(), "{name} has no corpus");
        corpus.iter().for_each(|bytes| target(bytes));
        for number in 0..CHANGES {
            let mut random = Random(number);
            let mut bytes = corpus[random.below(corpus.len())].clone();
            let other = &corpus[random.below(corpus.len())];
            random.change(&mut bytes, other);
            let outcome = std::panic::catch_unwind(|| target(&bytes));
            assert!(outcome.is_ok(), "{name} breaks at {bytes:?}");
        }
    }
}
