//! SplitMix64 (Steele, Lea and Flood, 2014): the seeded generator of tests, faults and synthetic loads.
//!
//! Equal seeds give equal numbers on every machine, so that a printed seed replays a run. It is
//! predictable: secrets come from the system.

/// The generator; each seed has its own sequence.
#[derive(Clone, Copy, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The increment of the state: 2^64 divided by the golden ratio, odd.
    pub const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

    /// The sequence of this seed.
    pub fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::INCREMENT);
        mix(self.0)
    }

    /// A number from 0 up to, but not including, 1.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number below `limit`; zero if that is zero.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }
}

/// The finaliser: every bit of the result depends on every bit of `word`.
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
    fn numbers_stay_below_their_limit() {
        let mut random = SplitMix64::new(7);
        for limit in [0, 1, 2, 1000, u64::MAX] {
            let below = random.below(limit);
            assert!(below < limit.max(1), "{below} of {limit}");
            assert!((0.0..1.0).contains(&random.unit()));
        }
    }
}
