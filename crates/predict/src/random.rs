//! Random numbers that are the same everywhere.

pub use weft_fabric::random::SplitMix64;
use weft_fabric::random::mix;

/// SplitMix64: a sequence for every pair of seed and stream.
#[derive(Clone, Copy, Debug)]
pub struct Random(SplitMix64);

impl Random {
    /// The sequence of `stream` under `seed`.
    pub fn new(seed: u64, stream: u64) -> Random {
        let stream = mix(stream.wrapping_add(SplitMix64::INCREMENT));
        Random(SplitMix64::new(mix(seed ^ stream)))
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0.bits()
    }

    /// From 0 to less than 1.
    pub fn uniform(&mut self) -> f64 {
        self.0.unit()
    }

    /// Exponentially distributed with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.uniform()).ln()
    }
}
