//! Reduce-scatter, all-gather and all-reduce on a circulant graph: few steps for any rank count.
//!
//! Source: Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv:2410.14234, 2024. In step `k`
//! (`K = ceil(log2 N)` steps in all) the distance between partners is `ceil(N / 2^k)`: for example 3, 2 and 1
//! among 6 ranks. Each rank numbers the blocks from its own on: rank `r`'s block `i` is vector block `(r + i) mod N`.
//! Cost, in the notation of [`ring`](crate::ring): `K a + (N-1)/N nb` for each phase, and `g` for each byte added; no
//! rank is folded. For a power of two, cost and volume equal recursive halving and doubling.

use crate::op::{Collective, Op, Rank, Span};
use crate::schedule::Schedule;

/// Circulant algorithm for a collective.
#[derive(Clone, Copy, Debug)]
pub struct Circulant {
    collective: Collective,
    ranks: u32,
    /// Steps per phase.
    depth: u32,
}

/// Sums travel in scratch, numbered from the rank's own block on; each step has separate slots for arrivals, since
/// peers are not notified when an earlier step's slots are free.
impl Circulant {
    /// Algorithm for a reduce-scatter, an all-gather or an all-reduce.
    pub(crate) fn new(collective: Collective, ranks: u32) -> Circulant {
        Circulant { collective, ranks, depth: ranks.next_power_of_two().ilog2() }
    }

    fn reduces(&self) -> bool {
        self.collective.reduces()
    }

    fn gathers(&self) -> bool {
        self.collective != Collective::ReduceScatter
    }

    /// Distance between partners in a step, from 1 on; step 0 has the rank count.
    fn distance(&self, step: u32) -> u32 {
        self.ranks.div_ceil(1 << step)
    }

    /// Number of blocks that a step moves.
    fn moved(&self, step: u32) -> u32 {
        self.distance(step - 1) - self.distance(step)
    }

    /// The rank `distance` ahead.
    fn ahead(&self, rank: Rank, distance: u32) -> Rank {
        Rank((rank.0 + distance) % self.ranks)
    }

    /// The rank `distance` behind.
    fn behind(&self, rank: Rank, distance: u32) -> Rank {
        Rank((rank.0 + self.ranks - distance) % self.ranks)
    }

    /// Run count for `blocks` consecutive blocks from `first` on: two if they pass the vector end.
    fn runs(&self, first: u32, blocks: u32) -> u32 {
        1 + u32::from(first + blocks > self.ranks)
    }

    /// A run of those blocks: its offset among them, its first block and its length.
    fn run(&self, first: u32, blocks: u32, run: u32) -> (u32, u32, u32) {
        let before = blocks.min(self.ranks - first);
        if run == 0 { (0, first, before) } else { (before, 0, blocks - before) }
    }

    /// True if an input block takes no part in the first step, and is copied to the sums.
    fn copies(&self) -> bool {
        self.ranks > 2 && self.ranks % 2 == 1
    }

    /// First scratch slot for arrivals in a step after the first.
    fn arrivals(&self, step: u32) -> u32 {
        2 * self.distance(1) - self.distance(step - 1)
    }

    /// Span with the rank's own result.
    fn result(&self, rank: Rank) -> Span {
        Span::output(if self.gathers() { rank.0 } else { 0 }, 1)
    }

    /// Operation count for `rank` in a first-phase step.
    fn reduce_len(&self, rank: Rank, step: u32) -> u32 {
        if step > 1 {
            return 3;
        }
        let (moved, ahead) = (self.moved(1), self.ahead(rank, self.distance(1)));
        self.runs(ahead.0, moved) + 1 + self.runs(rank.0, moved) + u32::from(self.copies())
    }

    /// The first step: input blocks are sent and added.
    fn first_op(&self, rank: Rank, index: u32) -> Op {
        let (distance, moved) = (self.distance(1), self.moved(1));
        let (to, from) = (self.ahead(rank, distance), self.behind(rank, distance));
        let sums = |rank, offset, blocks| {
            if self.depth == 1 { self.result(rank) } else { Span::scratch(offset, blocks) }
        };
        let (writes, runs) = (self.runs(to.0, moved), self.runs(rank.0, moved));
        if index < writes {
            let (offset, first, blocks) = self.run(to.0, moved, index);
            let (source, target) = (Span::input(first, blocks), sums(to, offset, blocks));
            return Op::Write { to, source, target, lane: 0, step: 0 };
        }
        match index - writes {
            0 => Op::Wait { from, lane: 0, count: runs },
            part if part <= runs => {
                let (offset, first, blocks) = self.run(rank.0, moved, part - 1);
                let (source, target) = (Span::input(first, blocks), sums(rank, offset, blocks));
                Op::Reduce { source, target }
            }
            _ => {
                let last = self.ahead(rank, distance - 1).0;
                Op::Copy { source: Span::input(last, 1), target: Span::scratch(distance - 1, 1) }
            }
        }
    }

    /// A later step in the first phase: sums are sent and added; the last one arrives at its position.
    fn reduce_op(&self, rank: Rank, step: u32, part: u32) -> Op {
        let (distance, moved) = (self.distance(step), self.moved(step));
        let (to, from) = (self.ahead(rank, distance), self.behind(rank, distance));
        let last = step == self.depth;
        let arrivals = Span::scratch(self.arrivals(step), moved);
        match part {
            0 => {
                let source = Span::scratch(distance, moved);
                let target = if last { self.result(to) } else { arrivals };
                Op::Write { to, source, target, lane: step - 1, step: step - 1 }
            }
            1 => Op::Wait { from, lane: step - 1, count: 1 },
            _ if last => Op::Reduce { source: Span::scratch(0, 1), target: self.result(rank) },
            _ => Op::Reduce { source: arrivals, target: Span::scratch(0, moved) },
        }
    }

    /// Operation count for `rank` in a second-phase step.
    fn gather_len(&self, rank: Rank, step: u32) -> u32 {
        self.runs(rank.0, self.moved(step)) + 1
    }

    /// A step in the second phase: the blocks from the rank's own on are sent behind.
    fn gather_op(&self, rank: Rank, step: u32, index: u32) -> Op {
        let (distance, moved) = (self.distance(step), self.moved(step));
        let lane = self.steps() - step;
        if index < self.runs(rank.0, moved) {
            let (_, first, blocks) = self.run(rank.0, moved, index);
            let to = self.behind(rank, distance);
            let blocks = Span::output(first, blocks);
            return Op::Write { to, source: blocks, target: blocks, lane, step: lane };
        }
        let from = self.ahead(rank, distance);
        Op::Wait { from, lane, count: self.runs(from.0, moved) }
    }
}

impl Schedule for Circulant {
    fn name(&self) -> &str {
        "circulant"
    }

    fn collective(&self) -> Collective {
        self.collective
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn blocks(&self) -> u32 {
        self.ranks
    }

    fn scratch_blocks(&self, _: Rank) -> u32 {
        if self.reduces() && self.depth > 1 { 2 * self.distance(1) - 2 } else { 0 }
    }

    fn steps(&self) -> u32 {
        self.depth * (u32::from(self.reduces()) + u32::from(self.gathers()))
    }

    fn len(&self, rank: Rank) -> u32 {
        let steps = || 1..=self.depth;
        let alone = u32::from(self.ranks == 1 || !self.reduces());
        let reduced: u32 = steps().map(|step| self.reduce_len(rank, step)).sum();
        let gathered: u32 = steps().map(|step| self.gather_len(rank, step)).sum();
        alone + u32::from(self.reduces()) * reduced + u32::from(self.gathers()) * gathered
    }

    /// O(log N): ranks differ in how many operations a step has.
    fn op(&self, rank: Rank, mut index: u32) -> Op {
        if self.ranks == 1 {
            return Op::copy_all(1);
        }
        if self.reduces() {
            for step in 1..=self.depth {
                let len = self.reduce_len(rank, step);
                if index < len && step == 1 {
                    return self.first_op(rank, index);
                }
                if index < len {
                    return self.reduce_op(rank, step, index);
                }
                index -= len;
            }
        } else {
            if index == 0 {
                return Op::Copy { source: Span::input(0, 1), target: Span::output(rank.0, 1) };
            }
            index -= 1;
        }
        for step in (1..=self.depth).rev() {
            let len = self.gather_len(rank, step);
            if index < len {
                return self.gather_op(rank, step, index);
            }
            index -= len;
        }
        unreachable!("the index is below the number of operations")
    }
}
