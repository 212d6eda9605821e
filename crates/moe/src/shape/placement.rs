//! Placement: owner rank for each expert.

use std::ops::Range;
use std::sync::Arc;

/// Experts in contiguous blocks over ranks.
///
/// By default rank `r` among `N` owns experts `r*E/N .. (r+1)*E/N`, rounded down: block sizes differ by at
/// most one, and with fewer experts than ranks some ranks own none. For example, 8 experts on 3 ranks make
/// blocks 0 to 1, 2 to 4 and 5 to 7. [`Placement::of_counts`] has blocks with any sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    ranks: u32,
    experts: u32,
    /// Each rank's first expert, then the expert count; `None` for the default.
    firsts: Option<Arc<[u32]>>,
}

impl Placement {
    /// Placement for `experts` on `ranks`; both at least 1.
    pub fn new(ranks: u32, experts: u32) -> Placement {
        assert!(ranks > 0 && experts > 0, "a placement has ranks and experts");
        Placement { ranks, experts, firsts: None }
    }

    /// Placement with the given expert count on each rank. For example, `[3, 5]` puts experts 0 to 2 on
    /// rank 0 and 3 to 7 on rank 1.
    ///
    /// # Panics
    /// If there are no ranks, no experts, or more experts than a `u32` counts.
    pub fn of_counts(counts: &[u32]) -> Placement {
        let mut firsts = vec![0u32];
        let mut end = 0u32;
        for &count in counts {
            end = end.checked_add(count).expect("experts count in 32 bits");
            firsts.push(end);
        }
        let even = Placement::new(counts.len() as u32, end);
        let is_even = (0..=even.ranks).all(|rank| even.first(rank) == firsts[rank as usize]);
        if is_even { even } else { Placement { firsts: Some(firsts.into()), ..even } }
    }

    /// Each rank's first expert, then the expert count; `None` for the blocks in [`Placement::new`].
    pub fn uneven(&self) -> Option<&[u32]> {
        self.firsts.as_deref()
    }

    /// World size.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Expert count on all ranks together.
    pub fn experts(&self) -> u32 {
        self.experts
    }

    /// The experts that `rank` owns.
    pub fn experts_of(&self, rank: u32) -> Range<u32> {
        self.first(rank)..self.first(rank + 1)
    }

    /// The rank that owns `expert`.
    pub fn owner(&self, expert: u32) -> u32 {
        if let Some(firsts) = &self.firsts {
            return firsts.partition_point(|first| *first <= expert) as u32 - 1;
        }
        let (ranks, experts) = (u64::from(self.ranks), u64::from(self.experts));
        (((u64::from(expert) + 1) * ranks - 1) / experts) as u32
    }

    /// Largest expert count on a rank.
    pub fn most_local(&self) -> u32 {
        match &self.firsts {
            Some(firsts) => firsts.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0),
            None => self.experts.div_ceil(self.ranks),
        }
    }

    /// Number of ranks that own at least one expert.
    pub fn owners(&self) -> u32 {
        match &self.firsts {
            Some(firsts) => firsts.windows(2).filter(|ends| ends[0] < ends[1]).count() as u32,
            None => self.ranks.min(self.experts),
        }
    }

    fn first(&self, rank: u32) -> u32 {
        if let Some(firsts) = &self.firsts {
            return firsts[rank as usize];
        }
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

        #[test]
        fn blocks_have_the_given_sizes(
            counts in prop::collection::vec(0u32..7, 1..80),
            some in any::<prop::sample::Index>(),
        ) {
            let mut counts = counts;
            let some = some.index(counts.len());
            counts[some] += 1;
            let placement = Placement::of_counts(&counts);
            prop_assert_eq!(placement.ranks() as usize, counts.len());
            prop_assert_eq!(placement.experts(), counts.iter().sum::<u32>());
            prop_assert_eq!(Some(&placement.most_local()), counts.iter().max());
            prop_assert_eq!(placement.owners() as usize, counts.iter().filter(|&&n| n > 0).count());
            let mut next = 0;
            for (rank, &count) in (0..).zip(&counts) {
                let block = placement.experts_of(rank);
                prop_assert_eq!(block.clone(), next..next + count);
                next = block.end;
                for expert in block {
                    prop_assert_eq!(placement.owner(expert), rank);
                }
            }
        }
    }

    #[test]
    fn sizes_as_by_default_are_the_default() {
        assert_eq!(Placement::of_counts(&[2, 3, 3]), Placement::new(3, 8));
        assert_eq!(Placement::of_counts(&[3, 3, 2]).uneven(), Some(&[0, 3, 6, 8][..]));
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let placement = Placement::new(u32::MAX, u32::MAX);
        assert_eq!(placement.owner(u32::MAX - 1), u32::MAX - 1);
        assert_eq!(placement.experts_of(u32::MAX - 1), u32::MAX - 1..u32::MAX);
    }
}
