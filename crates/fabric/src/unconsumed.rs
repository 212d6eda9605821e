//! Flow control for completion queues: unconsumed arrivals counted at both route ends.
//!
//! At most [`crate::RouteRule::max_unconsumed`] arrivals on a route lie in the owner's completion queue.
//! The sender counts posts; the owner sends a report each time it has consumed half that limit.

/// Sender's count of arrivals at one peer.
#[derive(Clone, Copy, Debug)]
pub struct SentArrivals {
    limit: u64,
    sent: u64,
    /// Sends allowed in total by the reports read last.
    allowed: u64,
}

impl SentArrivals {
    /// Count for a queue that may hold `limit` arrivals from this sender, at least 2.
    pub fn new(limit: u32) -> SentArrivals {
        let limit = u64::from(limit.max(2));
        SentArrivals { limit, sent: 0, allowed: limit }
    }

    /// True if `count` more arrivals may be sent, 1 or 2. `reports` returns how many reports were
    /// received; called only if the last known number does not suffice.
    #[inline(always)]
    pub fn may_send(&mut self, count: u32, reports: impl FnOnce() -> u64) -> bool {
        let sent = self.sent + u64::from(count);
        if sent > self.allowed {
            self.allowed = self.limit + reports() * (self.limit / 2);
        }
        sent <= self.allowed
    }

    /// Counts sent arrivals.
    #[inline]
    pub fn send(&mut self, count: u32) {
        self.sent += u64::from(count);
    }
}

/// Owner's count of arrivals from one peer.
#[derive(Clone, Copy, Debug)]
pub struct ConsumedArrivals {
    half: u32,
    consumed: u32,
}

impl ConsumedArrivals {
    /// Count for a queue that may hold `limit` arrivals from the peer, at least 2.
    pub fn new(limit: u32) -> ConsumedArrivals {
        ConsumedArrivals { half: limit.max(2) / 2, consumed: 0 }
    }

    /// Counts one consumed arrival. Returns true if a report is due.
    #[inline]
    pub fn consume(&mut self) -> bool {
        self.consumed += 1;
        let is_due = self.consumed == self.half;
        if is_due {
            self.consumed = 0;
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However sends, consumption and reports are ordered, unconsumed arrivals stay within the limit,
        /// at most three reports are in flight, and the sender can send at the end.
        #[test]
        fn unconsumed_arrivals_stay_within_the_limit_and_the_sender_is_never_stuck(
            limit in 2u32..40,
            steps in prop::collection::vec(0u32..4, 0..400),
        ) {
            let (mut outgoing, mut incoming) = (SentArrivals::new(limit), ConsumedArrivals::new(limit));
            let (mut lie, mut under_way, mut reports) = (0u32, 0u32, 0u64);
            let mut step = |which, lie: &mut u32, under_way: &mut u32, reports: &mut u64| match which {
                0 | 3 if outgoing.may_send(1 + which / 3, || *reports) => {
                    outgoing.send(1 + which / 3);
                    *lie += 1 + which / 3;
                    true
                }
                1 if *lie > 0 => {
                    *lie -= 1;
                    *under_way += u32::from(incoming.consume());
                    true
                }
                2 if *under_way > 0 => {
                    *under_way -= 1;
                    *reports += 1;
                    true
                }
                _ => false,
            };
            for which in steps {
                step(which, &mut lie, &mut under_way, &mut reports);
                prop_assert!(lie <= limit && under_way <= 3);
            }
            while lie > 0 || under_way > 0 {
                step(1, &mut lie, &mut under_way, &mut reports);
                step(2, &mut lie, &mut under_way, &mut reports);
            }
            // Two at once are the most that one post needs.
            prop_assert!(step(3, &mut lie, &mut under_way, &mut reports), "the sender is stuck");
        }
    }
}
