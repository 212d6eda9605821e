//! Direct algorithms: every rank writes to every other at once.
//!
//! With the letters of [`ring`](crate::ring), and where a rank's link is the narrowest place: one-shot
//! all-reduce takes `a + (N-1)nb + (N-1)ng`, two-shot `2a + 2(N-1)/N nb + (N-1)/N ng`; reduce-scatter, all-gather
//! and all-to-all `a + (N-1)/N nb` (and `(N-1)/N ng` for the sums). Each sum is added up in the order of the
//! ranks, so it is the same everywhere, and in every run.

use crate::op::{Collective, Op, Rank, Span};
use crate::ring::copy_all;
use crate::schedule::Schedule;

/// The other ranks in the order in which `rank` writes to them: its successor first, so that not all begin
/// with the same one.
pub(crate) fn peer(rank: u32, i: u32, ranks: u32) -> u32 {
    (rank + 1 + i) % ranks
}

/// How a member adds up what all members sent it, in their order. Member 0's contribution arrives where
/// the sum goes, the others' in slots.
pub(crate) struct OrderedSum {
    pub(crate) member: u32,
    pub(crate) members: u32,
}

/// A step of an ordered sum.
pub(crate) enum Part {
    /// Wait for this member.
    Wait(u32),
    /// Add this member's contribution, from its slot.
    Add(u32),
    /// Add the rank's own, or begin with it.
    Own,
}

impl OrderedSum {
    pub(crate) fn len(&self) -> u32 {
        2 * self.members - 1 - u32::from(self.member > 0)
    }

    pub(crate) fn slots(&self) -> u32 {
        if self.member == 0 { self.members - 1 } else { self.members - 2 }
    }

    /// The slot of a member that is neither 0 nor this one.
    pub(crate) fn slot(&self, from: u32) -> u32 {
        from - 1 - u32::from(self.member > 0 && from > self.member)
    }

    pub(crate) fn part(&self, index: u32) -> Part {
        let pair = |first: u32, index: u32| {
            let from = first + index / 2;
            if index.is_multiple_of(2) { Part::Wait(from) } else { Part::Add(from) }
        };
        let own = if self.member == 0 { 0 } else { 2 * self.member - 1 };
        match index {
            _ if index == own => Part::Own,
            _ if index > own => pair(self.member + 1, index - own - 1),
            0 => Part::Wait(0),
            _ => pair(1, index - 1),
        }
    }

    /// Where the contribution of `from` arrives, in spans of `blocks` blocks.
    pub(crate) fn arrival(&self, from: u32, sum: Span) -> Span {
        match from {
            0 => sum,
            _ => Span::scratch(self.slot(from) * sum.blocks, sum.blocks),
        }
    }

    /// The operation; `own` is the rank's contribution and `sum` where the sum goes.
    pub(crate) fn op(&self, index: u32, own: Span, sum: Span, rank: impl Fn(u32) -> Rank) -> Op {
        match self.part(index) {
            Part::Wait(from) => Op::Wait { from: rank(from), lane: 0, count: 1 },
            Part::Add(from) => Op::Reduce { source: self.arrival(from, sum), target: sum },
            Part::Own if self.member == 0 => Op::Copy { source: own, target: sum },
            Part::Own => Op::Reduce { source: own, target: sum },
        }
    }
}

/// The direct algorithms for each collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    OneShot,
    TwoShot,
    ReduceScatter,
    AllGather,
    AllToAll,
}

/// All-reduce in one or two shots, reduce-scatter, all-gather or all-to-all, each rank to each.
///
/// One-shot all-reduce sends everybody the whole vector: the fastest for very small ones. Two-shot
/// reduce-scatters and all-gathers.
#[derive(Clone, Copy, Debug)]
pub struct Direct {
    pub(crate) ranks: u32,
    pub(crate) kind: Kind,
}

impl Direct {
    fn sum(&self, member: u32) -> OrderedSum {
        OrderedSum { member, members: self.ranks }
    }

    /// Where rank `rank` adds up.
    fn place(&self, rank: u32) -> Span {
        match self.kind {
            Kind::TwoShot => Span::output(rank, 1),
            _ => Span::output(0, 1),
        }
    }

    /// What a rank has for `peer`.
    fn part(&self, peer: u32) -> Span {
        match self.kind {
            Kind::OneShot | Kind::AllGather => Span::input(0, 1),
            _ => Span::input(peer, 1),
        }
    }
}

impl Schedule for Direct {
    fn name(&self) -> &str {
        match self.kind {
            Kind::OneShot => "one-shot",
            Kind::TwoShot => "two-shot",
            _ => "direct",
        }
    }

    fn collective(&self) -> Collective {
        match self.kind {
            Kind::OneShot | Kind::TwoShot => Collective::AllReduce,
            Kind::ReduceScatter => Collective::ReduceScatter,
            Kind::AllGather => Collective::AllGather,
            Kind::AllToAll => Collective::AllToAll,
        }
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn blocks(&self) -> u32 {
        if self.kind == Kind::OneShot { 1 } else { self.ranks }
    }

    fn scratch_blocks(&self, rank: Rank) -> u32 {
        match self.kind {
            _ if self.ranks == 1 => 0,
            Kind::AllGather | Kind::AllToAll => 0,
            _ => self.sum(rank.0).slots(),
        }
    }

    fn steps(&self) -> u32 {
        match self.kind {
            _ if self.ranks == 1 => 0,
            Kind::TwoShot => 2,
            _ => 1,
        }
    }

    fn lanes(&self) -> u32 {
        if self.kind == Kind::TwoShot { 2 } else { 1 }
    }

    fn len(&self, rank: Rank) -> u32 {
        let others = self.ranks - 1;
        match self.kind {
            _ if self.ranks == 1 => 1,
            Kind::OneShot | Kind::ReduceScatter => others + self.sum(rank.0).len(),
            Kind::TwoShot => 3 * others + self.sum(rank.0).len(),
            Kind::AllGather | Kind::AllToAll => 2 * others + 1,
        }
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let (ranks, Rank(me)) = (self.ranks, rank);
        if ranks == 1 {
            return copy_all(1);
        }
        let others = ranks - 1;
        let gathers = matches!(self.kind, Kind::AllGather | Kind::AllToAll);
        if index < others {
            let to = peer(me, index, ranks);
            let target = if gathers {
                Span::output(me, 1)
            } else {
                self.sum(to).arrival(me, self.place(to))
            };
            return Op::Write { to: Rank(to), source: self.part(to), target, lane: 0, step: 0 };
        }
        let index = index - others;
        if gathers {
            return match index {
                0 => Op::Copy { source: self.part(me), target: Span::output(me, 1) },
                _ => Op::Wait { from: Rank(peer(me, index - 1, ranks)), lane: 0, count: 1 },
            };
        }
        let (sum, place) = (self.sum(me), self.place(me));
        if index < sum.len() {
            return sum.op(index, self.part(me), place, Rank);
        }
        // The second shot.
        let index = index - sum.len();
        if index < others {
            let to = Rank(peer(me, index, ranks));
            return Op::Write { to, source: place, target: place, lane: 1, step: 1 };
        }
        Op::Wait { from: Rank(peer(me, index - others, ranks)), lane: 1, count: 1 }
    }
}
