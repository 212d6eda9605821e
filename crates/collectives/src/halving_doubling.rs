//! All-reduce by recursive halving and doubling, with and without HDRM rank placement.

use crate::cube::{Cube, CubeLayout};
use crate::op::{Collective, Op, Rank};
use crate::schedule::Schedule;

/// All-reduce by halving-doubling: at level `k` a rank exchanges half the remaining blocks with the rank that differs
/// in bit `k`; then the sums return the same way.
///
/// Sources: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004 (vector halving, distance
/// doubling); Ruefenacht, Bull, Booth, "Generalisation of Recursive Doubling for AllReduce: Now with Simulation",
/// Parallel Computing, 2017 (levels with another base than 2). With `C = q 2^k` the largest such number up to `N`, `q`
/// in 1, 3, 5, 7, the last level has base `q`. Ranks from `C` on exchange `1/w` of the vector with each of `w` others
/// during the first two levels, `w` = 4, or `2q` if `k` = 1; this fold is Weft's own. Cost, in the notation of
/// [`ring`](crate::ring), for `L` levels: `2L a + 2(C-1)/C nb + (C-1)/C ng`, and `4/w nb + 1/w ng` more if `N > C`.
///
/// HDRM (Dong et al., "EFLOPS: algorithm and system co-design for a high performance distributed training platform",
/// HPCA 2020) is this schedule on a BiGraph, with ranks placed so that each bit's flip crosses between the two switch
/// halves: `weft-topology` computes that rank placement.
#[derive(Clone, Copy, Debug)]
pub struct HalvingDoubling {
    cube: Cube,
    ranks: u32,
    mapped: bool,
}

impl HalvingDoubling {
    pub(crate) fn new(ranks: u32, mapped: bool) -> HalvingDoubling {
        HalvingDoubling { cube: Cube::new(ranks, false), ranks, mapped }
    }
}

impl Schedule for HalvingDoubling {
    fn name(&self) -> &str {
        if self.mapped { "hdrm" } else { "hd" }
    }

    fn collective(&self) -> Collective {
        Collective::AllReduce
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn blocks(&self) -> u32 {
        self.cube.blocks()
    }

    fn scratch_blocks(&self, rank: Rank) -> u32 {
        self.cube.scratch(rank.0)
    }

    fn steps(&self) -> u32 {
        self.cube.steps()
    }

    fn lanes(&self) -> u32 {
        self.cube.steps()
    }

    fn len(&self, rank: Rank) -> u32 {
        self.cube.len(rank.0)
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let layout = CubeLayout { first_rank: 0, stride: 1, block: 0, scratch: 0, step: 0 };
        self.cube.op(rank.0, index, &layout)
    }
}
