//! All-reduce by recursive halving and doubling, with and without HDRM rank placement.

use crate::cube::{Cube, CubeLayout};
use crate::op::{Collective, Op, Rank};
use crate::schedule::Schedule;

/// All-reduce by halving-doubling: at level `k` a rank exchanges half of its remaining blocks with the rank that
/// differs in bit `k`; then the sums return the same way.
///
/// Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004 (vector halving,
/// distance doubling). With `P` the largest power of two up to `N`, ranks from `P` on send their vector to the rank
/// with their top bit cleared, and receive the result from it. Cost, in the notation of
/// [`ring`](crate::ring): `2 log2(P) a + 2(P-1)/P nb + (P-1)/P ng`, and `2a + 2nb + ng` more if `N > P`.
///
/// HDRM (Dong et al., "EFLOPS: algorithm and system co-design for a high performance distributed training
/// platform", HPCA 2020) is this schedule on a BiGraph, with ranks placed so that each bit's flip crosses
/// from one half of the switches to the other: `weft-topology` computes that rank placement.
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
