//! Expert map: each physical expert's logical expert, and each token's replica.

use crate::error::Error;
use crate::shape::placement::Placement;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Maximum number of replicas for one expert; the choice among them repeats after this many tokens.
pub const MOST_REPLICAS: u32 = 64;

/// Each physical expert's logical expert. Tokens name logical experts; each has one or more physical experts, its
/// replicas, with the same weights.
///
/// Physical experts are numbered rank by rank, so a rank's experts are a block: see [`ExpertMap::placement`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertMap {
    placement: Placement,
    /// By physical expert.
    logical: Arc<[u32]>,
    /// Physical experts grouped by logical expert, in ascending order.
    replicas: Arc<[u32]>,
    /// Start of each logical expert's group in `replicas`, then the last group's end.
    firsts: Arc<[u32]>,
}

impl ExpertMap {
    /// Map whose `ranks` list each physical expert's logical expert, by rank; there are `experts` logical experts.
    /// For example, `[[0, 1], [2, 0]]` gives expert 0 a replica on both ranks.
    ///
    /// # Errors
    /// [`Error::Zero`]; [`Error::MapExpert`] if a rank holds an expert that does not exist; [`Error::MapReplicas`] if
    /// an expert has no replica, or more than [`MOST_REPLICAS`].
    pub fn new(experts: u32, ranks: &[Vec<u32>]) -> Result<ExpertMap, Error> {
        for (field, value) in [("ranks", ranks.len()), ("experts", experts as usize)] {
            if value == 0 {
                return Err(Error::Zero { field });
            }
        }
        // Before memory for each expert is allocated: there may be billions.
        let held: BTreeSet<u32> = ranks.iter().flatten().copied().collect();
        if held.len() < experts as usize
            && let Some(expert) = (0..experts).find(|expert| !held.contains(expert))
        {
            return Err(Error::MapReplicas { expert, count: 0, most: MOST_REPLICAS });
        }
        let mut of_expert = vec![Vec::new(); experts as usize];
        let mut logical = Vec::new();
        for (rank, held) in (0..).zip(ranks) {
            for &expert in held {
                let Some(replicas) = of_expert.get_mut(expert as usize) else {
                    return Err(Error::MapExpert { rank, expert, experts });
                };
                replicas.push(logical.len() as u32);
                logical.push(expert);
            }
        }
        let mut firsts = vec![0];
        for (expert, replicas) in (0..).zip(&of_expert) {
            let count = replicas.len() as u32;
            if !(1..=MOST_REPLICAS).contains(&count) {
                return Err(Error::MapReplicas { expert, count, most: MOST_REPLICAS });
            }
            firsts.push(firsts[expert as usize] + count);
        }
        let counts: Vec<u32> = ranks.iter().map(|held| held.len() as u32).collect();
        Ok(ExpertMap {
            placement: Placement::of_counts(&counts),
            logical: logical.into(),
            replicas: of_expert.concat().into(),
            firsts: firsts.into(),
        })
    }

    /// Owner rank for each physical expert.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Logical expert count.
    pub fn experts(&self) -> u32 {
        self.firsts.len() as u32 - 1
    }

    /// Logical expert for each physical expert.
    pub fn logical(&self) -> &[u32] {
        &self.logical
    }

    /// Physical experts that hold `expert`, in ascending order.
    pub fn replicas_of(&self, expert: u32) -> &[u32] {
        let ends = &self.firsts[expert as usize..][..2];
        &self.replicas[ends[0] as usize..ends[1] as usize]
    }

    /// Physical expert that `rank` uses for `expert` and token number `token`: round robin over the replicas. For
    /// example, with replicas 0 and 5, rank 0's tokens 0, 1 and 2 use 0, 5 and 0.
    pub fn choose(&self, expert: u32, rank: u32, token: u32) -> u32 {
        let replicas = self.replicas_of(expert);
        let turn = rank.wrapping_add(token) % MOST_REPLICAS;
        replicas[turn as usize % replicas.len()]
    }

    /// Digest (FNV-1a over counts and logical experts): equal for equal maps, different with high probability
    /// otherwise.
    pub fn digest(&self) -> u64 {
        let ranks = 0..self.placement.ranks();
        let counts = ranks.map(|rank| self.placement.experts_of(rank).len() as u32);
        let words = [self.experts()].into_iter().chain(counts).chain(self.logical.iter().copied());
        words.flat_map(u32::to_le_bytes).fold(0xCBF2_9CE4_8422_2325, |digest, byte| {
            (digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn map(ranks: &[&[u32]], experts: u32) -> Result<ExpertMap, Error> {
        ExpertMap::new(experts, &ranks.iter().map(|held| held.to_vec()).collect::<Vec<_>>())
    }

    #[test]
    fn more_experts_than_memory_are_refused() {
        let error = map(&[&[0], &[1, 0]], u32::MAX).unwrap_err();
        assert!(matches!(error, Error::MapReplicas { expert: 2, count: 0, .. }), "{error}");
    }

    #[test]
    fn replicas_take_turns_by_token_and_rank() {
        let map = map(&[&[0, 2], &[], &[1, 0, 0]], 3).unwrap();
        assert_eq!(map.placement().experts_of(2), 2..5);
        assert_eq!(map.logical(), [0, 2, 1, 0, 0]);
        assert_eq!(map.replicas_of(0), [0, 3, 4]);
        let chosen = |rank| (0..4).map(|token| map.choose(0, rank, token)).collect::<Vec<_>>();
        assert_eq!(chosen(0), [0, 3, 4, 0]);
        assert_eq!(chosen(1), [3, 4, 0, 3]);
        // The sequence repeats after 64 tokens.
        assert_eq!(map.choose(0, 0, 64), 0);
        assert_eq!(map.choose(2, 7, 9), 1);
    }

    #[test]
    fn a_map_with_a_missing_or_unknown_expert_is_rejected() {
        for (ranks, words) in [
            (&[&[0u32, 1][..], &[1]][..], "expert 2 has 0 replicas"),
            (&[&[0, 1], &[3]], "rank 1 holds expert 3, but there are 3 experts"),
            (&[], "ranks is 0"),
            (&[&[0; 65], &[1, 2]], "expert 0 has 65 replicas"),
        ] {
            let error = map(ranks, 3).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    proptest! {
        #[test]
        fn every_choice_is_a_replica_and_shares_differ_by_little(
            held in prop::collection::vec(prop::collection::vec(0u32..5, 0..9), 1..9),
            rank in 0u32..64,
        ) {
            let mut held = held;
            held[0].extend(0..5);
            let map = ExpertMap::new(5, &held).unwrap();
            for expert in 0..5 {
                let mut taken = vec![0; map.logical().len()];
                (0..640).for_each(|token| taken[map.choose(expert, rank, token) as usize] += 1);
                let replicas = map.replicas_of(expert);
                prop_assert!(replicas.is_sorted());
                let shares = replicas.iter().map(|&physical| {
                    assert_eq!(map.logical()[physical as usize], expert);
                    taken[physical as usize]
                });
                // Ten sequences with 64 tokens each.
                let (least, most) = (shares.clone().min().unwrap(), shares.clone().max().unwrap());
                prop_assert!(most - least <= 10, "{taken:?}");
                prop_assert_eq!(shares.sum::<i32>(), 640);
            }
        }

        #[test]
        fn different_maps_have_different_digests(
            held in prop::collection::vec(prop::collection::vec(0u32..3, 0..4), 2..5),
            other in prop::collection::vec(prop::collection::vec(0u32..3, 0..4), 2..5),
        ) {
            let make = |mut held: Vec<Vec<u32>>| {
                held[0].extend(0..3);
                ExpertMap::new(3, &held).unwrap()
            };
            let (one, two) = (make(held), make(other));
            prop_assert_eq!(one == two, one.digest() == two.digest());
        }
    }
}
