//! Sum of the contributions of all members in rank order, and the write order.

use crate::op::{Op, Rank, Span};

/// The `i`-th rank to which `rank` writes. The order starts at the successor, so that the ranks start with different
/// peers.
pub(crate) fn peer(rank: u32, i: u32, ranks: u32) -> u32 {
    (rank + 1 + i) % ranks
}

/// Sum of the contributions of all members, in rank order, at one member. Member 0's contribution arrives at the
/// sum's position, the others in slots.
pub(crate) struct OrderedSum {
    pub(crate) member: u32,
    pub(crate) members: u32,
}

/// Step in an ordered sum.
pub(crate) enum SumStep {
    /// Wait for this member's contribution.
    Wait(u32),
    /// Add this member's contribution from its slot.
    Add(u32),
    /// Add the own contribution; member 0 starts with it.
    Own,
}

impl OrderedSum {
    pub(crate) fn len(&self) -> u32 {
        2 * self.members - 1 - u32::from(self.member > 0)
    }

    pub(crate) fn slots(&self) -> u32 {
        if self.member == 0 { self.members - 1 } else { self.members - 2 }
    }

    /// Slot for a member other than 0 and this one.
    pub(crate) fn slot(&self, from: u32) -> u32 {
        from - 1 - u32::from(self.member > 0 && from > self.member)
    }

    pub(crate) fn step(&self, index: u32) -> SumStep {
        let pair = |first: u32, index: u32| {
            let from = first + index / 2;
            if index.is_multiple_of(2) { SumStep::Wait(from) } else { SumStep::Add(from) }
        };
        let own = if self.member == 0 { 0 } else { 2 * self.member - 1 };
        match index {
            _ if index == own => SumStep::Own,
            _ if index > own => pair(self.member + 1, index - own - 1),
            0 => SumStep::Wait(0),
            _ => pair(1, index - 1),
        }
    }

    /// Span at which the contribution from `from` arrives.
    pub(crate) fn arrival(&self, from: u32, sum: Span) -> Span {
        match from {
            0 => sum,
            _ => Span::scratch(self.slot(from) * sum.blocks, sum.blocks),
        }
    }

    /// Operation `index`; `own` is the rank's contribution and `sum` the span for the sum.
    pub(crate) fn op(&self, index: u32, own: Span, sum: Span, rank: impl Fn(u32) -> Rank) -> Op {
        match self.step(index) {
            SumStep::Wait(from) => Op::Wait { from: rank(from), lane: 0, count: 1 },
            SumStep::Add(from) => Op::Reduce { source: self.arrival(from, sum), target: sum },
            SumStep::Own if self.member == 0 => Op::Copy { source: own, target: sum },
            SumStep::Own => Op::Reduce { source: own, target: sum },
        }
    }
}
