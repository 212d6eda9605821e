//! SplitMix64, the seeded generator for tests, faults and synthetic loads.
//!
//! Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014. Equal seeds
//! give equal sequences on every machine, so that a printed seed replays a run. The sequence is
//! predictable: secrets come from `getrandom`.

use std::time::Duration;

/// SplitMix64 generator: 64-bit state, period 2^64.
#[derive(Clone, Copy, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// State increment: 2^64 divided by the golden ratio, odd.
    pub const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

    /// Sequence for `seed`.
    pub fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// Sequence number `stream` for `seed`. Each independent source in a run draws from one.
    pub fn stream(seed: u64, stream: u64) -> SplitMix64 {
        let stream = mix(stream.wrapping_add(Self::INCREMENT));
        SplitMix64::new(mix(seed ^ stream))
    }

    /// Next 64 bits. Every other method draws through this one.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::INCREMENT);
        mix(self.0)
    }

    /// Uniform number in [0, 1), in steps of 2^-53.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform integer in [0, `limit`); zero if `limit` is zero. Bias: at most `limit` / 2^64.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// Exponentially distributed number with mean 1.
    #[inline]
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// `true` with `probability`. At zero or less, it draws no number.
    #[inline]
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.unit() <= probability
    }

    /// Uniform duration in [0, `limit`], in whole nanoseconds. A zero `limit` draws no number.
    pub fn duration(&mut self, limit: Duration) -> Duration {
        if limit.is_zero() {
            return limit;
        }
        let nanoseconds = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.below(nanoseconds.saturating_add(1)))
    }

    /// Shuffles `list`: Fisher-Yates, from the end.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for end in (1..list.len()).rev() {
            list.swap(end, self.below(end as u64 + 1) as usize);
        }
    }

    /// Fills `bytes` from one draw for each 8 bytes, little-endian.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.bits().to_le_bytes()[..chunk.len()]);
        }
    }
}

/// SplitMix64 finaliser, a bijection: each result bit depends on all bits of `word`.
#[inline]
pub fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_that_of_the_reference_implementation() {
        let mut random = SplitMix64::new(1_234_567);
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!([(); 5].map(|()| random.bits()), expected);
    }

    #[test]
    fn the_first_values_of_each_method_are_pinned() {
        let mut random = SplitMix64::new(42);
        assert_eq!([(); 4].map(|()| random.below(1000)), [741, 159, 278, 344]);
        assert_eq!(
            [(); 3].map(|()| random.unit().to_bits()),
            [0x3fa3_78b0_b448_9040, 0x3feb_c886_3f47_901b, 0x3fcb_f4b3_8e22_9bb4]
        );
        assert_eq!(
            [(); 3].map(|()| random.exponential().to_bits()),
            [0x3ff9_cd38_110b_f8b9, 0x3fda_9617_dd0b_f6ff, 0x3fee_d5ca_4247_4810]
        );
        assert_eq!(
            [(); 8].map(|()| random.chance(0.5)),
            [true, true, false, false, false, true, true, true]
        );
        let limit = Duration::from_micros(1);
        assert_eq!([(); 4].map(|()| random.duration(limit).as_nanos()), [93, 689, 958, 73]);
        let mut list = [0, 1, 2, 3, 4, 5, 6, 7];
        random.shuffle(&mut list);
        assert_eq!(list, [5, 6, 3, 2, 1, 0, 7, 4]);
        let mut bytes = [0; 11];
        random.fill(&mut bytes);
        assert_eq!(bytes, [67, 94, 88, 83, 27, 159, 181, 177, 117, 217, 19]);
        assert_eq!(random.bits(), 15_504_792_434_803_289_182);
    }

    #[test]
    fn streams_of_one_seed_are_pinned() {
        let first = |seed, stream| SplitMix64::stream(seed, stream).bits();
        assert_eq!(
            [first(0, 0), first(0, 1), first(7, 0), first(7, u64::MAX)],
            [
                6_235_967_106_033_911_276,
                7_982_734_928_498_899_980,
                8_879_317_973_683_161_050,
                686_028_366_111_335_694
            ]
        );
    }

    #[test]
    fn a_certain_outcome_and_an_empty_range_draw_no_number() {
        let mut random = SplitMix64::new(3);
        assert!(!random.chance(0.0));
        assert_eq!(random.duration(Duration::ZERO), Duration::ZERO);
        assert_eq!(random.bits(), SplitMix64::new(3).bits());
    }

    #[test]
    fn numbers_stay_below_their_limit() {
        let mut random = SplitMix64::new(7);
        for limit in [0, 1, 2, 1000, u64::MAX] {
            let below = random.below(limit);
            assert!(below < limit.max(1), "{below} of {limit}");
            assert!((0.0..1.0).contains(&random.unit()));
        }
    }
}
