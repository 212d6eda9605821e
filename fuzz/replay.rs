//! Replays every target's corpus, and random mutations, in the ordinary tests.

use super::{SplitMix64, TARGETS};
use std::path::Path;

const MUTATIONS: u64 = 20_000;

fn below(random: &mut SplitMix64, limit: usize) -> usize {
    random.below(limit as u64) as usize
}

/// Flips bits, sets bytes, truncates, removes a segment or inserts one from `other`.
fn mutate(random: &mut SplitMix64, bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..=below(random, 4) {
        let at = below(random, bytes.len() + 1);
        match below(random, 5) {
            0 if at < bytes.len() => bytes[at] ^= 1 << below(random, 8),
            1 if at < bytes.len() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][below(random, 5)],
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(at..(at + below(random, 9)).min(bytes.len()))),
            _ => {
                let from = below(random, other.len() + 1);
                let piece = &other[from..(from + below(random, 17)).min(other.len())];
                bytes.splice(at..at, piece.iter().copied());
            }
        }
    }
}

/// Inputs in `fuzz/corpus/TARGET.txt`: a name and hexadecimal digits a line.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target)
        .with_extension("txt");
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let inputs = text.lines().filter(|line| !line.starts_with('#'));
    inputs.map(|line| decode(line.split_once(' ').map_or("", |(_, digits)| digits))).collect()
}

fn decode(digits: &str) -> Vec<u8> {
    assert!(digits.len().is_multiple_of(2), "{digits}: odd number of digits");
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal digits");
    (0..digits.len()).step_by(2).map(byte).collect()
}

#[test]
#[cfg_attr(miri, ignore = "corpora are files, and isolated miri reads none")]
fn corpora_and_mutations_of_them_violate_no_property() {
    for (name, target) in TARGETS {
        let corpus = corpus(name);
        assert!(!corpus.is_empty(), "{name} has no corpus");
        corpus.iter().for_each(|bytes| target(bytes));
        for number in 0..MUTATIONS {
            let mut random = SplitMix64::new(number);
            let mut bytes = corpus[below(&mut random, corpus.len())].clone();
            let other = &corpus[below(&mut random, corpus.len())];
            mutate(&mut random, &mut bytes, other);
            let outcome = std::panic::catch_unwind(|| target(&bytes));
            assert!(outcome.is_ok(), "{name} fails at {bytes:?}");
        }
    }
}
