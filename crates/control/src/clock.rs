//! Clock alignment between hosts, for one common timeline.

use crate::Member;

/// This host's monotonic clock (CLOCK_MONOTONIC) in nanoseconds, shared by all processes. The clock behind
/// [`crate::Control::clock_offset`] and of [`std::time::Instant`].
#[inline]
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// This rank's clock minus rank 0's, with its error bound, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClockOffset {
    pub nanoseconds: i64,
    pub error: u64,
}

impl ClockOffset {
    pub(crate) const UNKNOWN: ClockOffset = ClockOffset { nanoseconds: 0, error: u64::MAX };

    /// Offset from one ping: `sent` and `received` on this clock, `responded` on the other. The response was
    /// sent at some time in between, so half the round trip bounds the error (Cristian, 1989).
    pub(crate) fn from_ping(sent: u64, responded: u64, received: u64) -> ClockOffset {
        let round_trip = received.saturating_sub(sent);
        let middle = sent as i128 + i128::from(round_trip / 2);
        let nanoseconds = (middle - i128::from(responded)) as i64;
        ClockOffset { nanoseconds, error: round_trip.div_ceil(2) }
    }

    pub(crate) fn more_precise(self, other: ClockOffset) -> ClockOffset {
        if other.error < self.error { other } else { self }
    }
}

/// Offset for each rank from all measurements. Ranks on one host share a clock, so they share the most
/// precise measurement among them; rank 0's host has offset zero.
pub(crate) fn align(members: &[Member], measured: &[ClockOffset]) -> Vec<ClockOffset> {
    let Some(first) = members.first() else { return Vec::new() };
    let of_host = |host: &str| {
        if host == first.host_id {
            return ClockOffset { nanoseconds: 0, error: 0 };
        }
        members
            .iter()
            .zip(measured)
            .filter(|(member, _)| member.host_id == host)
            .fold(ClockOffset::UNKNOWN, |best, (_, offset)| best.more_precise(*offset))
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
            // The other clock is `ahead` of this one, so the offset is the negative.
            let offset = ClockOffset::from_ping(start, start + there + ahead, start + there + back);
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
        let offset = |nanoseconds, error| ClockOffset { nanoseconds, error };
        let aligned = align(
            &[member(0, "a"), member(1, "a"), member(2, "b"), member(3, "b")],
            &[offset(0, 0), offset(7, 9), offset(100, 50), offset(90, 20)],
        );
        assert_eq!(aligned, [offset(0, 0), offset(0, 0), offset(90, 20), offset(90, 20)]);
    }
}
