//! Which rank owns which expert.

use std::ops::Range;

/// Experts in contiguous blocks over ranks: rank `r` of `N` owns `r*E/N .. (r+1)*E/N`, rounded down.
///
/// Blocks differ in size by at most one. With fewer experts than ranks, some ranks own none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    ranks: u32,
    experts: u32,
}

impl Placement {
    /// The placement of `experts` on `ranks`; both at least 1.
    pub fn new(ranks: u32, experts: u32) -> Placement {
        assert!(ranks > 0 && experts > 0, "a placement has ranks and experts");
        Placement { ranks, experts }
    }

    /// The number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The number of experts of all ranks together.
    pub fn experts(&self) -> u32 {
        self.experts
    }

    /// The experts that `rank` owns.
    pub fn experts_of(&self, rank: u32) -> Range<u32> {
        self.first(rank)..self.first(rank + 1)
    }

    /// The rank that owns `expert`.
    pub fn owner(&self, expert: u32) -> u32 {
        let (ranks, experts) = (u64::from(self.ranks), u64::from(self.experts));
        (((u64::from(expert) + 1) * ranks - 1) / experts) as u32
    }

    /// The most experts that any rank owns.
    pub fn most_local(&self) -> u32 {
        self.experts.div_ceil(self.ranks)
    }

    /// The number of ranks that own at least one expert.
    pub fn owners(&self) -> u32 {
        self.ranks.min(self.experts)
    }

    fn first(&self, rank: u32) -> u32 {
        (u64::from(rank) * u64::from(self.experts) / u64::from(self.ranks)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_cover_every_expert_once_and_agree_with_owner(
            ranks in 1u32..80,
            experts in 1u32..300,
        ) {
            let placement = Placement::new(ranks, experts);
            let mut next = 0;
            for rank in 0..ranks {
                let block = placement.experts_of(rank);
                prop_assert_eq!(block.start, next);
                next = block.end;
                prop_assert!(block.len() as u32 <= placement.most_local());
                prop_assert!(block.len() as u32 + 1 >= placement.most_local());
                for expert in block {
                    prop_assert_eq!(placement.owner(expert), rank);
                }
            }
            prop_assert_eq!(next, experts);
            let owners = (0..ranks).filter(|&rank| !placement.experts_of(rank).is_empty()).count();
            prop_assert_eq!(owners as u32, placement.owners());
        }
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let placement = Placement::new(u32::MAX, u32::MAX);
        assert_eq!(placement.owner(u32::MAX - 1), u32::MAX - 1);
        assert_eq!(placement.experts_of(u32::MAX - 1), u32::MAX - 1..u32::MAX);
    }
}
