//! Aligning the clocks of several hosts, well enough to draw one timeline.

use crate::Member;

/// This host's monotonic clock in nanoseconds, which all its processes share: the clock of
/// [`crate::Control::clock_offset`] and of [`std::time::Instant`].
#[inline]
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// This rank's clock minus rank 0's, and by how much that may be wrong at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offset {
    pub nanoseconds: i64,
    pub error: u64,
}

impl Offset {
    pub(crate) const UNKNOWN: Offset = Offset { nanoseconds: 0, error: u64::MAX };

    /// What one ping says: sent and received by this clock, answered by the other. The answer was
    /// given somewhere in between, so half the round trip bounds the error.
    pub(crate) fn from_ping(sent: u64, answered: u64, received: u64) -> Offset {
        let round_trip = received.saturating_sub(sent);
        let middle = sent as i128 + i128::from(round_trip / 2);
        let nanoseconds = (middle - i128::from(answered)) as i64;
        Offset { nanoseconds, error: round_trip.div_ceil(2) }
    }

    pub(crate) fn better(self, other: Offset) -> Offset {
        if other.error < self.error { other } else { self }
    }
}

/// One offset per rank out of what each measured. Ranks of one host share a clock, so they share
/// the best measurement among them, and the host of rank 0 has offset zero.
pub(crate) fn align(members: &[Member], measured: &[Offset]) -> Vec<Offset> {
    let Some(first) = members.first() else { return Vec::new() };
    let of_host = |host: &str| {
        if host == first.host_id {
            return Offset { nanoseconds: 0, error: 0 };
        }
        members
            .iter()
            .zip(measured)
            .filter(|(member, _)| member.host_id == host)
            .fold(Offset::UNKNOWN, |best, (_, offset)| best.better(*offset))
    };
    members.iter().map(|member| of_host(&member.host_id)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rank;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_true_offset_lies_within_the_bound(
            start in 0u64..1 << 50, there in 0u64..1 << 30, back in 0u64..1 << 30,
            ahead in 0u64..1 << 50,
        ) {
            // The other clock is `ahead` of ours, so ours minus the other is its negative.
            let offset = Offset::from_ping(start, start + there + ahead, start + there + back);
            let wrong_by = (offset.nanoseconds + ahead as i64).unsigned_abs();
            prop_assert!(wrong_by <= offset.error, "{wrong_by} > {}", offset.error);
        }
    }

    #[test]
    fn ranks_of_one_host_share_the_best_measurement() {
        let member = |rank, host: &str| Member {
            rank: Rank(rank),
            original_rank: Rank(rank),
            host_id: host.into(),
            pid: 1,
            local_index: 0,
            address: [127, 0, 0, 1].into(),
        };
        let offset = |nanoseconds, error| Offset { nanoseconds, error };
        let aligned = align(
            &[member(0, "a"), member(1, "a"), member(2, "b"), member(3, "b")],
            &[offset(0, 0), offset(7, 9), offset(100, 50), offset(90, 20)],
        );
        assert_eq!(aligned, [offset(0, 0), offset(0, 0), offset(90, 20), offset(90, 20)]);
    }
}
