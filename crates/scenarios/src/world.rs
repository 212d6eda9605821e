//! Random worlds, and draws for scenarios.

use std::time::Duration;
use weft_fabric::providers::sim::{Faults, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_fabric::{LatencyBandwidth, PartRule, Rank};

/// World for a seed, with up to 20 parts and `max_queue_bytes` in flight between two ranks. In half the
/// worlds, a rank's transfers are serialised.
pub fn world_config(
    ranks: u32,
    seed: u64,
    max_queue_bytes: u64,
    parts: PartRule,
    faults: &Faults,
) -> WorldConfig {
    let mut random = SplitMix64::new(seed ^ 0x0077_6f72_6c64);
    let model = LatencyBandwidth::new(Duration::from_micros(2), 1_000_000_000);
    WorldConfig {
        queue_parts: 1 + random.below(20) as u32,
        queue_bytes: 1 + random.below(max_queue_bytes),
        parts,
        model: Box::new(if random.chance(0.5) { model.serialised() } else { model }),
        ..WorldConfig::new(ranks, seed).with_faults(faults.clone())
    }
}

/// Uniformly chosen element.
pub fn pick<T: Copy>(random: &mut SplitMix64, list: &[T]) -> T {
    list[random.below(list.len() as u64) as usize]
}

/// Uniformly chosen number in `from..=to`.
pub fn within(random: &mut SplitMix64, from: u32, to: u32) -> u32 {
    from + random.below(u64::from(to - from) + 1) as u32
}

/// All ranks, in random order.
pub fn shuffled_ranks(random: &mut SplitMix64, ranks: u32) -> Vec<Rank> {
    let mut shuffled: Vec<Rank> = (0..ranks).map(Rank).collect();
    random.shuffle(&mut shuffled);
    shuffled
}
