//! The one source of chance: SplitMix64, so that a seed means the same everywhere.

use crate::random::SplitMix64;
use std::time::Duration;

pub(super) use crate::random::mix;

/// A generator; equal seeds give equal numbers.
#[derive(Clone, Debug)]
pub struct Random {
    numbers: SplitMix64,
}

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Random {
        Random { numbers: SplitMix64::new(seed) }
    }

    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.numbers.bits()
    }

    /// A number below `limit`; zero if that is zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.numbers.below(limit)
    }

    /// `true` with this probability. Draws nothing if there is no question.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.numbers.unit() <= probability
    }

    /// A duration of at most `limit`.
    pub fn up_to(&mut self, limit: Duration) -> Duration {
        if limit.is_zero() {
            return limit;
        }
        let nanoseconds = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.below(nanoseconds.saturating_add(1)))
    }

    /// Puts a list into a random order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for end in (1..list.len()).rev() {
            list.swap(end, self.below(end as u64 + 1) as usize);
        }
    }

    /// Random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.word().to_le_bytes()[..chunk.len()]);
        }
    }
}

/// A number that stands for `bytes`, folded into `digest`.
pub(super) fn digest(digest: u64, bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(digest ^ bytes.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(sum ^ u64::from_le_bytes(word)).wrapping_add(sum)
    })
}
