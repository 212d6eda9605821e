//! Direct algorithms: every rank writes to every other at once.
//!
//! Algorithm `direct-read` has the same schedules, executed by reads: a write is then a signal to the target, which
//! reads the source in place, see `executor/read_plan.rs`.
//!
//! Cost, in the notation of [`ring`](crate::ring), if a rank's link is the bottleneck: one-shot all-reduce takes
//! `a + (N-1)nb + (N-1)ng`, two-shot `2a + 2(N-1)/N nb + (N-1)/N ng`; reduce-scatter, all-gather and all-to-all
//! `a + (N-1)/N nb` (and `(N-1)/N ng` for the sums), broadcast `a + (N-1)nb`. Each sum is added in rank order, so it is
//! equal at all ranks and in every run.

use crate::op::{Collective, Op, Rank, Span};
use crate::ordered_sum::{OrderedSum, peer};
use crate::schedule::Schedule;

/// Direct algorithm variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DirectVariant {
    OneShot,
    TwoShot,
    ReduceScatter,
    AllGather,
    AllToAll,
    Broadcast { root: Rank },
}

/// All-reduce in one or two shots, reduce-scatter, all-gather or all-to-all, from each rank to each; broadcast from the
/// root to each.
///
/// One-shot all-reduce sends the whole vector to all ranks: the fastest for very small ones. Two-shot is a
/// reduce-scatter and an all-gather.
#[derive(Clone, Copy, Debug)]
pub struct Direct {
    pub(crate) ranks: u32,
    pub(crate) variant: DirectVariant,
}

impl Direct {
    fn sum(&self, member: u32) -> OrderedSum {
        OrderedSum { member, members: self.ranks }
    }

    /// Span for the sum at rank `rank`.
    fn place(&self, rank: u32) -> Span {
        match self.variant {
            DirectVariant::TwoShot => Span::output(rank, 1),
            _ => Span::output(0, 1),
        }
    }

    /// Input blocks for `peer`.
    fn part(&self, peer: u32) -> Span {
        match self.variant {
            DirectVariant::OneShot | DirectVariant::AllGather | DirectVariant::Broadcast { .. } => {
                Span::input(0, 1)
            }
            _ => Span::input(peer, 1),
        }
    }
}

impl Schedule for Direct {
    fn name(&self) -> &str {
        match self.variant {
            DirectVariant::OneShot => "one-shot",
            DirectVariant::TwoShot => "two-shot",
            _ => "direct",
        }
    }

    fn collective(&self) -> Collective {
        match self.variant {
            DirectVariant::OneShot | DirectVariant::TwoShot => Collective::AllReduce,
            DirectVariant::ReduceScatter => Collective::ReduceScatter,
            DirectVariant::AllGather => Collective::AllGather,
            DirectVariant::AllToAll => Collective::AllToAll,
            DirectVariant::Broadcast { root } => Collective::Broadcast { root },
        }
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn blocks(&self) -> u32 {
        match self.variant {
            DirectVariant::OneShot | DirectVariant::Broadcast { .. } => 1,
            _ => self.ranks,
        }
    }

    fn scratch_blocks(&self, rank: Rank) -> u32 {
        match self.variant {
            _ if self.ranks == 1 => 0,
            DirectVariant::AllGather
            | DirectVariant::AllToAll
            | DirectVariant::Broadcast { .. } => 0,
            _ => self.sum(rank.0).slots(),
        }
    }

    fn steps(&self) -> u32 {
        match self.variant {
            _ if self.ranks == 1 => 0,
            DirectVariant::TwoShot => 2,
            _ => 1,
        }
    }

    fn lanes(&self) -> u32 {
        if self.variant == DirectVariant::TwoShot { 2 } else { 1 }
    }

    fn len(&self, rank: Rank) -> u32 {
        let others = self.ranks - 1;
        match self.variant {
            _ if self.ranks == 1 => 1,
            DirectVariant::OneShot | DirectVariant::ReduceScatter => {
                others + self.sum(rank.0).len()
            }
            DirectVariant::TwoShot => 3 * others + self.sum(rank.0).len(),
            DirectVariant::AllGather | DirectVariant::AllToAll => 2 * others + 1,
            DirectVariant::Broadcast { root } if root == rank => others + 1,
            DirectVariant::Broadcast { .. } => 1,
        }
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let (ranks, Rank(me)) = (self.ranks, rank);
        if ranks == 1 {
            return Op::copy_all(1);
        }
        let others = ranks - 1;
        if let DirectVariant::Broadcast { root } = self.variant {
            let (source, target) = (Span::input(0, 1), Span::output(0, 1));
            return match index {
                _ if root != rank => Op::Wait { from: root, lane: 0, count: 1 },
                _ if index == others => Op::copy_all(1),
                _ => {
                    let to = Rank(peer(me, index, ranks));
                    Op::Write { to, source, target, lane: 0, step: 0 }
                }
            };
        }
        let gathers = matches!(self.variant, DirectVariant::AllGather | DirectVariant::AllToAll);
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
        // Second shot.
        let index = index - sum.len();
        if index < others {
            let to = Rank(peer(me, index, ranks));
            return Op::Write { to, source: place, target: place, lane: 1, step: 1 };
        }
        Op::Wait { from: Rank(peer(me, index - others, ranks)), lane: 1, count: 1 }
    }
}
