//! Reduce-scatter by recursive halving, all-gather by recursive doubling.
//!
//! Source: Thakur, Rabenseifner, Gropp 2005 (see [`pairwise`](crate::pairwise)). With `P = 2^L` the largest such number
//! up to `N`, the first `2(N-P)` ranks are neighbour pairs: the odd rank is folded onto the even one, its proxy, which
//! sends and receives for both, so that the ranks in each subtree own consecutive blocks. Cost, in the notation of
//! [`ring`](crate::ring): `L a + (N-1)/N nb`, and `g` for each byte added. For `N > P` it is `(L+2) a`; `2^k` members
//! own up to `2^k + min(2^k, N-P)` blocks, so the factor for `b` is the sum over these for `k < L`, plus `N+1`, over
//! `N`, and the factor for `g` is one block less. That is at most `7/5 n` more.

use crate::op::{Collective, Op, Rank, Span};
use crate::schedule::Schedule;

/// Members in the power-of-two group: `2^levels` neighbour pairs and single ranks. For example, 6 ranks form the members
/// (0, 1), (2, 3), 4 and 5.
#[derive(Clone, Copy, Debug)]
struct Members {
    ranks: u32,
    levels: u32,
}

impl Members {
    fn new(ranks: u32) -> Members {
        Members { ranks, levels: ranks.ilog2() }
    }

    fn count(&self) -> u32 {
        1 << self.levels
    }

    fn pairs(&self) -> u32 {
        self.ranks - self.count()
    }

    fn is_proxy(&self, member: u32) -> bool {
        member < self.pairs()
    }

    fn is_folded(&self, rank: u32) -> bool {
        rank < 2 * self.pairs() && rank % 2 == 1
    }

    /// A rank's member; for a folded rank, the proxy's member.
    fn member(&self, rank: u32) -> u32 {
        if rank < 2 * self.pairs() { rank / 2 } else { rank - self.pairs() }
    }

    fn rank(&self, member: u32) -> Rank {
        Rank(self.first(member))
    }

    /// A member's first block.
    fn first(&self, member: u32) -> u32 {
        member + member.min(self.pairs())
    }

    /// Blocks, as first and count, for the `2^bits` members that differ from `member` in the lowest `bits` bits.
    fn blocks(&self, member: u32, bits: u32) -> (u32, u32) {
        let from = member >> bits << bits;
        let first = self.first(from);
        (first, self.first(from + (1 << bits)) - first)
    }

    fn fold(&self) -> u32 {
        u32::from(self.pairs() > 0)
    }
}

/// Reduce-scatter by recursive halving: in each step a rank exchanges half the remaining blocks with a rank in the
/// other half.
#[derive(Clone, Copy, Debug)]
pub struct RecursiveHalving {
    members: Members,
}

impl RecursiveHalving {
    pub(crate) fn new(ranks: u32) -> RecursiveHalving {
        RecursiveHalving { members: Members::new(ranks) }
    }

    /// Blocks whose sums have slots, as first and count. A proxy starts with all blocks, other members with
    /// half.
    fn kept(&self, member: u32) -> (u32, u32) {
        let m = &self.members;
        m.blocks(member, if m.is_proxy(member) { m.levels } else { m.levels.saturating_sub(1) })
    }

    fn sums(&self, member: u32, (first, blocks): (u32, u32)) -> Span {
        Span::scratch(first - self.kept(member).0, blocks)
    }

    /// True if the arrivals at `level` become the sum, to which the rank adds its contribution.
    fn first_sum(&self, member: u32, level: u32) -> bool {
        level == 0 && !self.members.is_proxy(member)
    }

    /// True if the arrival at `level` is the rank's share.
    fn final_sum(&self, member: u32, level: u32) -> bool {
        level + 1 == self.members.levels && !self.members.is_proxy(member)
    }

    /// Blocks that `member` keeps after `level`, as first and count.
    fn keeps(&self, member: u32, level: u32) -> (u32, u32) {
        self.members.blocks(member, self.members.levels - 1 - level)
    }

    fn arrival(&self, member: u32, level: u32) -> Span {
        let m = &self.members;
        let keeps = self.keeps(member, level);
        if self.final_sum(member, level) {
            return Span::output(0, 1);
        }
        if self.first_sum(member, level) {
            return self.sums(member, keeps);
        }
        // Slots for each level follow the sums: a subtree has at most twice as many blocks as members. Only a proxy
        // needs the level-0 slots.
        let from = if m.is_proxy(member) { m.count() } else { m.count() / 2 };
        let before = (from - (m.count() >> level)) << m.fold();
        Span::scratch(self.kept(member).1 + before, keeps.1)
    }

    /// Span for some blocks at a member before `level`.
    fn own(&self, member: u32, level: u32, blocks: (u32, u32)) -> Span {
        if self.first_sum(member, level) {
            Span::input(blocks.0, blocks.1)
        } else {
            self.sums(member, blocks)
        }
    }
}

impl Schedule for RecursiveHalving {
    fn name(&self) -> &str {
        "hd"
    }

    fn collective(&self) -> Collective {
        Collective::ReduceScatter
    }

    fn ranks(&self) -> u32 {
        self.members.ranks
    }

    fn blocks(&self) -> u32 {
        self.members.ranks
    }

    fn scratch_blocks(&self, rank: Rank) -> u32 {
        let m = &self.members;
        let member = m.member(rank.0);
        if m.ranks == 1 || m.is_folded(rank.0) {
            return 0;
        }
        let last = (0..m.levels).map(|level| self.arrival(member, level));
        let ends = last.filter(|s| *s != Span::output(0, 1)).map(|s| s.first + s.blocks);
        ends.max().unwrap_or(0)
    }

    fn steps(&self) -> u32 {
        self.members.levels + 2 * self.members.fold()
    }

    fn len(&self, rank: Rank) -> u32 {
        let m = &self.members;
        match m.member(rank.0) {
            _ if m.ranks == 1 => 1,
            _ if m.is_folded(rank.0) => 2,
            member if m.is_proxy(member) => 2 + 3 * m.levels + 2,
            _ => 3 * m.levels,
        }
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let m = &self.members;
        if m.ranks == 1 {
            return Op::copy_all(1);
        }
        let member = m.member(rank.0);
        let (last, all) = (self.steps() - 1, m.ranks);
        let partner = Rank(rank.0 ^ 1);
        if m.is_folded(rank.0) {
            let (source, target) = (Span::input(0, all), Span::scratch(0, all));
            return match index {
                0 => Op::Write { to: partner, source, target, lane: 0, step: 0 },
                _ => Op::Wait { from: partner, lane: last, count: 1 },
            };
        }
        let mut index = index;
        if m.is_proxy(member) {
            let (source, target) = (Span::input(0, all), Span::scratch(0, all));
            let done = 2 + 3 * m.levels;
            let share = |rank: u32| self.sums(member, (rank, 1));
            let target_share = Span::output(0, 1);
            match index {
                0 => return Op::Wait { from: partner, lane: 0, count: 1 },
                1 => return Op::Reduce { source, target },
                _ if index == done => {
                    let (source, target) = (share(partner.0), target_share);
                    return Op::Write { to: partner, source, target, lane: last, step: last };
                }
                _ if index > done => {
                    return Op::Copy { source: share(rank.0), target: target_share };
                }
                _ => index -= 2,
            }
        }
        let level = index / 3;
        let step = m.fold() + level;
        let peer = member ^ (1 << (m.levels - 1 - level));
        match index % 3 {
            0 => {
                let source = self.own(member, level, self.keeps(peer, level));
                let target = self.arrival(peer, level);
                Op::Write { to: m.rank(peer), source, target, lane: step, step }
            }
            1 => Op::Wait { from: m.rank(peer), lane: step, count: 1 },
            _ => {
                let (arrived, own) = (
                    self.arrival(member, level),
                    self.own(member, level, self.keeps(member, level)),
                );
                if self.first_sum(member, level) || self.final_sum(member, level) {
                    Op::Reduce { source: own, target: arrived }
                } else {
                    Op::Reduce { source: arrived, target: own }
                }
            }
        }
    }
}

/// All-gather by recursive doubling: in each step a rank exchanges all its blocks with a rank in the other half.
#[derive(Clone, Copy, Debug)]
pub struct RecursiveDoubling {
    members: Members,
}

impl RecursiveDoubling {
    pub(crate) fn new(ranks: u32) -> RecursiveDoubling {
        RecursiveDoubling { members: Members::new(ranks) }
    }
}

impl Schedule for RecursiveDoubling {
    fn name(&self) -> &str {
        "hd"
    }

    fn collective(&self) -> Collective {
        Collective::AllGather
    }

    fn ranks(&self) -> u32 {
        self.members.ranks
    }

    fn blocks(&self) -> u32 {
        self.members.ranks
    }

    fn steps(&self) -> u32 {
        self.members.levels + 2 * self.members.fold()
    }

    fn len(&self, rank: Rank) -> u32 {
        let m = &self.members;
        match m.member(rank.0) {
            _ if m.is_folded(rank.0) => 2,
            member if m.is_proxy(member) => 3 + 2 * m.levels,
            _ => 1 + 2 * m.levels,
        }
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let m = &self.members;
        let member = m.member(rank.0);
        let partner = Rank(rank.0 ^ 1);
        let last = self.steps().saturating_sub(1);
        let (own, place) = (Span::input(0, 1), Span::output(rank.0, 1));
        if m.is_folded(rank.0) {
            return match index {
                0 => Op::Write { to: partner, source: own, target: place, lane: 0, step: 0 },
                _ => Op::Wait { from: partner, lane: last, count: 1 },
            };
        }
        let mut index = match index {
            0 => return Op::Copy { source: own, target: place },
            _ => index - 1,
        };
        if m.is_proxy(member) {
            let all = Span::output(0, m.ranks);
            match index {
                0 => return Op::Wait { from: partner, lane: 0, count: 1 },
                _ if index == 1 + 2 * m.levels => {
                    return Op::Write {
                        to: partner,
                        source: all,
                        target: all,
                        lane: last,
                        step: last,
                    };
                }
                _ => index -= 1,
            }
        }
        let level = index / 2;
        let step = m.fold() + level;
        let to = m.rank(member ^ (1 << level));
        if index % 2 == 1 {
            return Op::Wait { from: to, lane: step, count: 1 };
        }
        let (first, blocks) = m.blocks(member, level);
        let has = Span::output(first, blocks);
        Op::Write { to, source: has, target: has, lane: step, step }
    }
}
