//! All-to-all by pairwise exchange.

use crate::op::{Collective, Op, Rank, Span};
use crate::schedule::Schedule;

/// All-to-all in `N-1` steps, each a permutation: in step `s` rank `r` exchanges with rank `r xor s` if `N = 2^k`;
/// otherwise it writes to rank `r + s mod N`.
///
/// Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH",
/// IJHPCA 2005. Cost, in the notation of [`ring`](crate::ring): `(N-1)a + (N-1)/N nb`. No scratch.
#[derive(Clone, Copy, Debug)]
pub struct Pairwise {
    pub(crate) ranks: u32,
}

impl Schedule for Pairwise {
    fn name(&self) -> &str {
        "pairwise"
    }

    fn collective(&self) -> Collective {
        Collective::AllToAll
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

    fn lanes(&self) -> u32 {
        1
    }

    fn len(&self, _: Rank) -> u32 {
        2 * (self.ranks - 1) + 1
    }

    fn op(&self, Rank(me): Rank, index: u32) -> Op {
        let ranks = self.ranks;
        // The copy follows the first write, and is first if there is none.
        let index = match index {
            _ if ranks > 1 && index == 0 => 0,
            0 | 1 => return Op::Copy { source: Span::input(me, 1), target: Span::output(me, 1) },
            _ => index - 1,
        };
        let step = index / 2;
        let (to, from) = if ranks.is_power_of_two() {
            (me ^ (step + 1), me ^ (step + 1))
        } else {
            ((me + step + 1) % ranks, (me + ranks - step - 1) % ranks)
        };
        if index % 2 == 1 {
            return Op::Wait { from: Rank(from), lane: 0, count: 1 };
        }
        let (source, target) = (Span::input(to, 1), Span::output(me, 1));
        Op::Write { to: Rank(to), source, target, lane: 0, step }
    }
}
