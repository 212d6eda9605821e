//! Bound on unconsumed arrivals: what two ends of a route count so that no completion queue overflows.
//!
//! A route may have [`crate::RouteRule::max_unconsumed`] arrivals that lie in their owner's queue. Each
//! end of the pair counts what it sends. The owner reports each half of the bound that it has consumed,
//! so a sender needs no report for what came before, and reports are few.

/// Arrivals of one peer, counted by their sender.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing {
    limit: u64,
    sent: u64,
    /// So many may be sent in all, by the reports that were read last.
    allowed: u64,
}

impl Outgoing {
    /// A sender toward a queue in which `limit` of its arrivals may lie, at least 2.
    pub fn new(limit: u32) -> Outgoing {
        let limit = u64::from(limit.max(2));
        Outgoing { limit, sent: 0, allowed: limit }
    }

    /// Whether one more may be sent. `reports` returns the number of reports that have come; it is called only if
    /// those known do not suffice.
    #[inline(always)]
    pub fn may_send(&mut self, reports: impl FnOnce() -> u64) -> bool {
        if self.sent == self.allowed {
            self.allowed = self.limit + reports() * (self.limit / 2);
        }
        self.sent < self.allowed
    }

    /// One was sent.
    #[inline]
    pub fn send(&mut self) {
        self.sent += 1;
    }
}

/// Arrivals of one peer, counted by their owner.
#[derive(Clone, Copy, Debug)]
pub struct Incoming {
    half: u32,
    consumed: u32,
}

impl Incoming {
    /// The owner of a queue in which `limit` arrivals of the peer may lie, at least 2.
    pub fn new(limit: u32) -> Incoming {
        Incoming { half: limit.max(2) / 2, consumed: 0 }
    }

    /// One was consumed. Returns whether a report is due.
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
        /// Whatever the order of sends, of consumption and of reports' arrivals: no more than the limit
        /// lie unconsumed, no more than three reports are under way, and nothing is stuck at the end.
        #[test]
        fn no_more_than_the_limit_lie_unconsumed_and_nothing_is_stuck(
            limit in 2u32..40,
            steps in prop::collection::vec(0u8..3, 0..400),
        ) {
            let (mut outgoing, mut incoming) = (Outgoing::new(limit), Incoming::new(limit));
            let (mut lie, mut under_way, mut reports) = (0u32, 0u32, 0u64);
            let mut step = |which, lie: &mut u32, under_way: &mut u32, reports: &mut u64| match which {
                0 if outgoing.may_send(|| *reports) => {
                    outgoing.send();
                    *lie += 1;
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
            prop_assert!(step(0, &mut lie, &mut under_way, &mut reports), "the sender is stuck");
        }
    }
}
