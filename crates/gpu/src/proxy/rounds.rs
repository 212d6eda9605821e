//! Rounds: what one word has toward a peer and from it.

use super::outstanding::Waiting;

/// Maximum rounds in a window.
pub const MAX_ROUNDS: u32 = 64;

/// Rounds of one word toward one peer and from it.
#[derive(Debug, Default)]
pub(super) struct End {
    /// Next round to write.
    pub next: u64,
    /// Credits from the peer.
    pub credits: u64,
    /// Parts that wait for a credit.
    pub waiting: Waiting,
    pub arrived: ArrivedRounds,
    /// Rounds from the peer that this rank has credited.
    pub credited: u64,
}

impl End {
    /// True if the next round may be written.
    pub fn has_credit(&self, window: u32) -> bool {
        self.next < self.credits + u64::from(window)
    }
}

/// Rounds that have arrived, in any order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ArrivedRounds {
    /// Leading rounds that have arrived whole.
    pub leading: u64,
    /// Bit i: round `leading + i` has arrived. Bit 0 is never set.
    beyond: u64,
}

impl ArrivedRounds {
    /// Adds a round that has arrived whole, possibly once more, and returns how many more lead. `None` if it is beyond
    /// the largest window.
    pub fn add(&mut self, round: u64) -> Option<u32> {
        let Some(ahead) = round.checked_sub(self.leading) else { return Some(0) };
        if ahead >= u64::from(MAX_ROUNDS) {
            return None;
        }
        self.beyond |= 1 << ahead;
        let more = self.beyond.trailing_ones();
        self.beyond = self.beyond.checked_shr(more).unwrap_or(0);
        self.leading += u64::from(more);
        Some(more)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_leading_rounds_count() {
        let mut arrived = ArrivedRounds::default();
        let mut add = |round| (arrived.add(round).unwrap(), arrived.leading);
        assert_eq!([add(2), add(1), add(1)], [(0, 0); 3]);
        assert_eq!([add(0), add(0), add(2)], [(3, 3), (0, 3), (0, 3)]);
        assert_eq!([add(3), add(5), add(4)], [(1, 4), (0, 4), (2, 6)]);
    }

    #[test]
    fn a_full_window_may_arrive_backwards() {
        let mut arrived = ArrivedRounds::default();
        for round in (1..64).rev() {
            assert_eq!(arrived.add(round), Some(0));
        }
        assert_eq!(arrived.add(64), None);
        assert_eq!(arrived.add(u64::MAX), None);
        assert_eq!((arrived.add(0), arrived.leading, arrived.beyond), (Some(64), 64, 0));
    }

    proptest! {
        #[test]
        fn rounds_in_any_order_of_a_window_lead_once(window in 1..=64u64, order in any::<[u8; 200]>()) {
            let mut arrived = ArrivedRounds::default();
            let mut model = std::collections::BTreeSet::new();
            let mut leading = 0;
            for draw in order {
                let round = leading + u64::from(draw) % window;
                model.insert(round);
                let before = leading;
                while model.contains(&leading) {
                    leading += 1;
                }
                prop_assert_eq!(arrived.add(round), Some((leading - before) as u32));
                prop_assert_eq!(arrived.leading, leading);
            }
        }
    }
}
