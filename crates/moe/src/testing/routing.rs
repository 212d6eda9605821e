//! Synthetic routings for tests and benchmarks, and load imbalance.

use std::fmt;

use crate::shape::placement::Placement;
use weft_fabric::random::SplitMix64;

/// Synthetic router distribution. A token's experts are distinct; with fewer experts than top-k slots, the
/// last slots are empty (-1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Routing {
    /// Uniform over the experts.
    Uniform,
    /// The i-th most popular expert has a probability proportional to `i^-exponent`. For example, with
    /// exponent 1 the second is half as likely as the first. The seed shuffles the popularity order, the same
    /// on every rank.
    Zipf {
        /// 0 is uniform; 1 is the classic law.
        exponent: f64,
    },
    /// Every token names the first `top_k` experts: with top-1 one expert receives all tokens, otherwise as
    /// few ranks as possible.
    Incast,
}

impl Routing {
    /// Ids (`tokens * top_k`) in `rank`'s batch, a pure function of the arguments.
    pub fn ids(self, seed: u64, rank: u32, tokens: usize, top_k: usize, experts: u32) -> Vec<i64> {
        let mut random =
            SplitMix64::new(seed ^ u64::from(rank).wrapping_mul(0xA24B_AED4_963E_E407));
        let order = popularity(self, seed, experts);
        let heights = cumulative(self, experts);
        let mut ids = Vec::with_capacity(tokens * top_k);
        let mut taken = vec![usize::MAX; experts as usize];
        for token in 0..tokens {
            for slot in 0..top_k {
                if slot >= experts as usize {
                    ids.push(-1);
                    continue;
                }
                let place = match self {
                    Routing::Incast => slot,
                    _ => pick(&mut random, &heights, &taken, token),
                };
                taken[place] = token;
                ids.push(order[place].into());
            }
        }
        ids
    }

    /// Router weights (`tokens * top_k`): positive, and they sum to 1 for each token.
    pub fn weights(seed: u64, rank: u32, tokens: usize, top_k: usize) -> Vec<f32> {
        let mut random =
            SplitMix64::new(!seed ^ u64::from(rank).wrapping_mul(0x9FB2_1C65_1E98_DF25));
        let mut weights: Vec<f32> =
            (0..tokens * top_k).map(|_| 0.05 + random.unit() as f32).collect();
        for weights in weights.chunks_exact_mut(top_k) {
            let sum: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        weights
    }
}

/// Experts in popularity order.
fn popularity(routing: Routing, seed: u64, experts: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..experts).collect();
    if let Routing::Zipf { .. } = routing {
        let mut random = SplitMix64::new(seed);
        for last in (1..order.len()).rev() {
            order.swap(last, random.below(last as u64 + 1) as usize);
        }
    }
    order
}

/// Cumulative probability by popularity rank, not normalised.
fn cumulative(routing: Routing, experts: u32) -> Vec<f64> {
    let mut sum = 0.0;
    (1..=experts)
        .map(|place| {
            sum += match routing {
                Routing::Zipf { exponent } => f64::from(place).powf(-exponent),
                _ => 1.0,
            };
            sum
        })
        .collect()
}

/// A place that this token has not taken: by rejection, at most 32 draws, then the first free place after the
/// last draw. So a steep distribution terminates.
fn pick(random: &mut SplitMix64, heights: &[f64], taken: &[usize], token: usize) -> usize {
    let total = heights.last().copied().unwrap_or(0.0);
    let mut place = 0;
    for _ in 0..32 {
        let height = random.unit() * total;
        place = heights.partition_point(|h| *h <= height).min(heights.len() - 1);
        if taken[place] != token {
            return place;
        }
    }
    (0..heights.len())
        .map(|step| (place + step) % heights.len())
        .find(|place| taken[*place] != token)
        .unwrap_or(place)
}

/// Expert and rank load, over all ranks' batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// For each expert, the tokens that name it.
    pub of_expert: Vec<u64>,
    /// For each rank, the rows that it receives: a token counts once, with any number of experts.
    pub to_rank: Vec<u64>,
}

impl Load {
    /// Zero load on the experts and ranks in `placement`.
    pub fn new(placement: &Placement) -> Load {
        let (ranks, experts) = (placement.ranks() as usize, placement.experts() as usize);
        Load { of_expert: vec![0; experts], to_rank: vec![0; ranks] }
    }

    /// Adds one rank's batch, with the counts from its [`SendPlan`](crate::SendPlan).
    pub fn add(&mut self, rows_to_rank: &[u32], rows_of_expert: &[u32]) {
        for (total, count) in self.to_rank.iter_mut().zip(rows_to_rank) {
            *total += u64::from(*count);
        }
        for (total, count) in self.of_expert.iter_mut().zip(rows_of_expert) {
            *total += u64::from(*count);
        }
    }

    /// Rows in total.
    pub fn rows(&self) -> u64 {
        self.to_rank.iter().sum()
    }

    /// Rows in total with one copy per expert.
    pub fn pairs(&self) -> u64 {
        self.of_expert.iter().sum()
    }

    /// Busiest expert's load over the mean; 1 without load. For example, loads 6, 2 and 1 give 2.
    pub fn expert_imbalance(&self) -> f64 {
        imbalance(&self.of_expert)
    }

    /// Busiest rank's rows over the mean; 1 without load.
    pub fn rank_imbalance(&self) -> f64 {
        imbalance(&self.to_rank)
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} rows for {} token-expert pairs; busiest expert {:.2} times the mean, busiest rank {:.2}",
            self.rows(),
            self.pairs(),
            self.expert_imbalance(),
            self.rank_imbalance()
        )
    }
}

fn imbalance(loads: &[u64]) -> f64 {
    let sum: u64 = loads.iter().sum();
    let most = loads.iter().copied().max().unwrap_or(0);
    if sum == 0 { 1.0 } else { most as f64 * loads.len() as f64 / sum as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_token_names_distinct_experts(
            seed in any::<u64>(),
            tokens in 0usize..20,
            top_k in 1usize..9,
            experts in 1u32..20,
            routing in prop_oneof![
                Just(Routing::Uniform),
                Just(Routing::Incast),
                (0.0..6.0).prop_map(|exponent| Routing::Zipf { exponent }),
            ],
        ) {
            let ids = routing.ids(seed, 3, tokens, top_k, experts);
            prop_assert_eq!(&ids, &routing.ids(seed, 3, tokens, top_k, experts));
            prop_assert_eq!(ids.len(), tokens * top_k);
            for ids in ids.chunks_exact(top_k) {
                let mut named: Vec<i64> = ids.iter().copied().filter(|id| *id >= 0).collect();
                prop_assert_eq!(named.len(), top_k.min(experts as usize));
                prop_assert!(named.iter().all(|id| *id < i64::from(experts)));
                named.sort_unstable();
                named.dedup();
                prop_assert_eq!(named.len(), top_k.min(experts as usize));
            }
            for weights in Routing::weights(seed, 3, tokens, top_k).chunks_exact(top_k) {
                prop_assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn zipf_is_more_uneven_than_uniform_and_incast_is_the_worst() {
        let placement = Placement::new(4, 16);
        let imbalance = |routing: Routing| {
            let mut load = Load::new(&placement);
            let mut of_expert = [0; 16];
            for id in routing.ids(1, 0, 2000, 1, 16) {
                of_expert[id as usize] += 1;
            }
            load.add(&[], &of_expert);
            load.expert_imbalance()
        };
        let uniform = imbalance(Routing::Uniform);
        let zipf = imbalance(Routing::Zipf { exponent: 1.0 });
        assert!(uniform < 1.3 && zipf > 2.0, "{uniform} {zipf}");
        assert_eq!(imbalance(Routing::Incast), 16.0);
    }
}
