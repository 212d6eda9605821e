//! Ring algorithms: each rank sends only to its successor.
//!
//! Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009;
//! Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience", 2007. With
//! time `a` per message, `b` per byte on a link and `g` per byte added, `n` bytes and `N` ranks, all-reduce takes
//! `2(N-1)a + 2(N-1)/N nb + (N-1)/N ng`, reduce-scatter and all-gather half each (all-gather without `g`).

use crate::op::{Collective, Op, Rank, Span};
use crate::schedule::Schedule;

/// All-reduce by a ring: `N-1` reduce-scatter steps, `N-1` all-gather steps, for example 14 in all among 8 ranks. No
/// scratch.
///
/// Partial sums travel in the output: a partial sum arrives at its block's position, and the rank adds its input to it.
/// The final sum overwrites the partial sum only after that was sent on.
#[derive(Clone, Copy, Debug)]
pub struct RingAllReduce {
    pub(crate) ranks: u32,
}

/// Reduce-scatter by a ring in `N-1` steps. Partial sums travel through `N-2` scratch slots.
#[derive(Clone, Copy, Debug)]
pub struct RingReduceScatter {
    pub(crate) ranks: u32,
}

/// All-gather by a ring in `N-1` steps. No scratch.
#[derive(Clone, Copy, Debug)]
pub struct RingAllGather {
    pub(crate) ranks: u32,
}

fn next(rank: Rank, ranks: u32) -> Rank {
    Rank(if rank.0 + 1 == ranks { 0 } else { rank.0 + 1 })
}

fn previous(rank: Rank, ranks: u32) -> Rank {
    Rank(if rank.0 == 0 { ranks - 1 } else { rank.0 - 1 })
}

/// `rank - back` around the ring, for `back` up to `2 * ranks`.
fn behind(rank: Rank, back: u32, ranks: u32) -> u32 {
    (rank.0 + 2 * ranks - back) % ranks
}

impl Schedule for RingAllReduce {
    fn name(&self) -> &str {
        "ring"
    }

    fn collective(&self) -> Collective {
        Collective::AllReduce
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn blocks(&self) -> u32 {
        self.ranks
    }

    fn steps(&self) -> u32 {
        2 * (self.ranks - 1)
    }

    fn len(&self, _: Rank) -> u32 {
        (5 * (self.ranks - 1)).max(1)
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let ranks = self.ranks;
        if ranks == 1 {
            return Op::copy_all(1);
        }
        let reducing = 3 * (ranks - 1);
        let (step, part) = if index < reducing {
            (index / 3, index % 3)
        } else {
            (ranks - 1 + (index - reducing) / 2, (index - reducing) % 2)
        };
        match part {
            0 => {
                let block = behind(rank, step, ranks);
                let source = if step == 0 { Span::input(block, 1) } else { Span::output(block, 1) };
                let target = Span::output(block, 1);
                Op::Write { to: next(rank, ranks), source, target, lane: step, step }
            }
            1 => Op::Wait { from: previous(rank, ranks), lane: step, count: 1 },
            _ => {
                let block = behind(rank, step + 1, ranks);
                Op::Reduce { source: Span::input(block, 1), target: Span::output(block, 1) }
            }
        }
    }
}

impl Schedule for RingReduceScatter {
    fn name(&self) -> &str {
        "ring"
    }

    fn collective(&self) -> Collective {
        Collective::ReduceScatter
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn blocks(&self) -> u32 {
        self.ranks
    }

    fn scratch_blocks(&self, _: Rank) -> u32 {
        self.ranks.saturating_sub(2)
    }

    fn steps(&self) -> u32 {
        self.ranks - 1
    }

    fn len(&self, _: Rank) -> u32 {
        (3 * (self.ranks - 1)).max(1)
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let ranks = self.ranks;
        if ranks == 1 {
            return Op::copy_all(1);
        }
        let step = index / 3;
        // The arrival in the last step is the rank's own block.
        let arrival = |step| {
            if step + 2 == ranks { Span::output(0, 1) } else { Span::scratch(step, 1) }
        };
        match index % 3 {
            0 => {
                let block = behind(rank, step + 1, ranks);
                let source =
                    if step == 0 { Span::input(block, 1) } else { Span::scratch(step - 1, 1) };
                Op::Write { to: next(rank, ranks), source, target: arrival(step), lane: step, step }
            }
            1 => Op::Wait { from: previous(rank, ranks), lane: step, count: 1 },
            _ => Op::Reduce {
                source: Span::input(behind(rank, step + 2, ranks), 1),
                target: arrival(step),
            },
        }
    }
}

impl Schedule for RingAllGather {
    fn name(&self) -> &str {
        "ring"
    }

    fn collective(&self) -> Collective {
        Collective::AllGather
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn blocks(&self) -> u32 {
        self.ranks
    }

    fn steps(&self) -> u32 {
        self.ranks - 1
    }

    fn len(&self, _: Rank) -> u32 {
        2 * (self.ranks - 1) + 1
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        let ranks = self.ranks;
        let own = Op::Copy { source: Span::input(0, 1), target: Span::output(rank.0, 1) };
        if ranks == 1 {
            return own;
        }
        // The copy follows the first write, which does not depend on it.
        let index = match index {
            0 => 0,
            1 => return own,
            _ => index - 1,
        };
        let step = index / 2;
        if index % 2 == 1 {
            return Op::Wait { from: previous(rank, ranks), lane: step, count: 1 };
        }
        let block = behind(rank, step, ranks);
        let source = if step == 0 { Span::input(0, 1) } else { Span::output(block, 1) };
        let target = Span::output(block, 1);
        Op::Write { to: next(rank, ranks), source, target, lane: step, step }
    }
}
