//! All-reduce in two layers: within nodes, and between nodes on rails.

use crate::cube::{Cube, CubeLayout};
use crate::op::{Collective, Op, Rank, Span};
use crate::ordered_sum::{OrderedSum, peer};
use crate::schedule::Schedule;

/// All-reduce with `G` ranks on each node: a direct reduce-scatter within the node, halving-doubling (HDRM, with the
/// rails' rank placement) among the ranks with equal numbers on all nodes, a direct all-gather within the node. Rank
/// `r` has number `r mod G` on node `r / G`.
///
/// Between nodes each rank sends `2/G` of the vector over its own NIC. Cost, in the notation of [`ring`](crate::ring), for
/// `M` nodes, `C`, `L` and `w` for `M` as in [`halving_doubling`](crate::halving_doubling), and `a'`, `b'` within the node:
/// `2a' + 2(G-1)/G nb' + 2L a + 2(C-1)/C n/G b + ((G-1)/G + (C-1)/CG) ng`, and `4/w n/G b + 1/w n/G g` more if `M > C`.
#[derive(Clone, Copy, Debug)]
pub struct Hierarchical {
    local: u32,
    ranks: u32,
    cube: Cube,
}

impl Hierarchical {
    /// `ranks` is divisible by `local`.
    pub(crate) fn new(ranks: u32, local: u32) -> Hierarchical {
        Hierarchical { local, ranks, cube: Cube::new(ranks / local, local > 1) }
    }

    fn sum(&self, number: u32) -> OrderedSum {
        OrderedSum { member: number, members: self.local }
    }

    /// Blocks that rank number `number` on each node sums, as first and count.
    fn part(&self, number: u32) -> (u32, u32) {
        (number * self.cube.blocks(), self.cube.blocks())
    }

    fn slots(&self, number: u32) -> u32 {
        if self.local == 1 { 0 } else { self.sum(number).slots() * self.cube.blocks() }
    }

    /// Steps within the node, before the rails and after.
    fn inside(&self) -> u32 {
        u32::from(self.local > 1)
    }
}

impl Schedule for Hierarchical {
    fn name(&self) -> &str {
        "hierarchical"
    }

    fn collective(&self) -> Collective {
        Collective::AllReduce
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn blocks(&self) -> u32 {
        self.local * self.cube.blocks()
    }

    fn scratch_blocks(&self, rank: Rank) -> u32 {
        self.slots(rank.0 % self.local) + self.cube.scratch(rank.0 / self.local)
    }

    fn steps(&self) -> u32 {
        self.cube.steps() + 2 * self.inside()
    }

    fn len(&self, rank: Rank) -> u32 {
        let (node, number) = (rank.0 / self.local, rank.0 % self.local);
        let inside =
            if self.local == 1 { 0 } else { 3 * (self.local - 1) + self.sum(number).len() };
        inside + self.cube.len(node)
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let local = self.local;
        let (node, number) = (rank.0 / local, rank.0 % local);
        let here = |number: u32| Rank(node * local + number);
        let others = local - 1;
        let (first, blocks) = self.part(number);
        let own = Span::output(first, blocks);
        if index < others {
            let to = peer(number, index, local);
            let (first, blocks) = self.part(to);
            let target = self.sum(to).arrival(number, Span::output(first, blocks));
            let source = Span::input(first, blocks);
            return Op::Write { to: here(to), source, target, lane: 0, step: 0 };
        }
        let mut index = index - others;
        if others > 0 {
            let sum = self.sum(number);
            if index < sum.len() {
                return sum.op(index, Span::input(first, blocks), own, here);
            }
            index -= sum.len();
        }
        if index < self.cube.len(node) {
            let (scratch, step) = (self.slots(number), self.inside());
            let layout =
                CubeLayout { first_rank: number, stride: local, block: first, scratch, step };
            return self.cube.op(node, index, &layout);
        }
        let index = index - self.cube.len(node);
        let last = self.steps() - 1;
        if index < others {
            let to = here(peer(number, index, local));
            return Op::Write { to, source: own, target: own, lane: last, step: last };
        }
        Op::Wait { from: here(peer(number, index - others, local)), lane: last, count: 1 }
    }
}
