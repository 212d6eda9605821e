//! Policies: which node gets a query.

/// Rule by which the ledger chooses among nodes with a free slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// The next node in join order.
    #[default]
    RoundRobin,
    /// The node with the fewest queries in flight, quarantined ones included.
    LeastInFlight,
    /// The node for which the mean latency times (queries in flight + 1) is least: 2 ms with 3 in flight, for
    /// example, comes after 3 ms with 1. A node without an answer so far comes first.
    LatencyAware,
}

/// Node load, as policies see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Load {
    /// Slots in use.
    pub in_flight: u32,
    /// Mean latency in nanoseconds; 0 before the first answer.
    pub latency: u64,
}

/// The newest latency's weight in the mean: 1/8.
const SHIFT: u32 = 3;

impl Load {
    /// Enters an answer's latency in nanoseconds into the exponentially weighted mean.
    pub fn answered_after(&mut self, latency: u64) {
        let newest = latency.max(1);
        self.latency = match self.latency {
            0 => newest,
            mean => (mean - (mean >> SHIFT)).saturating_add(newest >> SHIFT).max(1),
        };
    }
}

impl Policy {
    /// Chooses among `nodes` candidates; `load` returns the load if a node may take a query. Ties go to the
    /// first candidate from `cursor` on, cyclically.
    pub(super) fn choose(
        self,
        nodes: usize,
        cursor: usize,
        load: impl Fn(usize) -> Option<Load>,
    ) -> Option<usize> {
        if self == Policy::RoundRobin && cursor < nodes && load(cursor).is_some() {
            return Some(cursor);
        }
        let order = (cursor..nodes).chain(0..cursor.min(nodes));
        let mut candidates = order.filter_map(|node| Some((node, load(node)?)));
        let chosen = match self {
            Policy::RoundRobin => candidates.next(),
            Policy::LeastInFlight => candidates.min_by_key(|(_, load)| load.in_flight),
            Policy::LatencyAware => candidates
                .min_by_key(|(_, load)| load.latency.saturating_mul(u64::from(load.in_flight) + 1)),
        };
        chosen.map(|(node, _)| node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(policy: Policy, cursor: usize, loads: &[Option<(u32, u64)>]) -> Option<usize> {
        let load =
            |node: usize| loads[node].map(|(in_flight, latency)| Load { in_flight, latency });
        policy.choose(loads.len(), cursor, load)
    }

    #[test]
    fn each_policy_chooses_by_its_own_measure() {
        let loads = [Some((3, 10)), None, Some((2, 1000)), Some((2, 100))];
        assert_eq!(chosen(Policy::RoundRobin, 1, &loads), Some(2));
        assert_eq!(chosen(Policy::LeastInFlight, 0, &loads), Some(2));
        assert_eq!(chosen(Policy::LeastInFlight, 3, &loads), Some(3), "ties go round");
        assert_eq!(chosen(Policy::LatencyAware, 2, &loads), Some(0));
        let unknown = [Some((0, 1)), Some((5, 0))];
        assert_eq!(chosen(Policy::LatencyAware, 0, &unknown), Some(1));
        for policy in [Policy::RoundRobin, Policy::LeastInFlight, Policy::LatencyAware] {
            assert_eq!(chosen(policy, 2, &[None, None]), None);
        }
    }

    #[test]
    fn the_mean_latency_follows_the_answers() {
        let mut load = Load { in_flight: 0, latency: 0 };
        load.answered_after(800);
        assert_eq!(load.latency, 800);
        load.answered_after(1600);
        assert_eq!(load.latency, 900);
        for _ in 0..200 {
            load.answered_after(80);
        }
        assert!((80..=90).contains(&load.latency), "{}", load.latency);
        load.answered_after(u64::MAX);
        assert!(load.latency > 1 << 60);
    }
}
