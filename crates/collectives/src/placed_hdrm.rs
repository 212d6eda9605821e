//! HDRM among ranks in another order than by number.

use crate::error::Error;
use crate::halving_doubling::HalvingDoubling;
use crate::op::{Collective, Op, Rank};
use crate::schedule::Schedule;
use std::sync::Arc;

/// All-reduce by HDRM, in which rank `order[p]` takes position `p`: for example, with `[2, 0, 3, 1]` rank 2 is first.
/// Sums are added in position order.
#[derive(Clone, Debug)]
pub struct PlacedHdrm {
    schedule: HalvingDoubling,
    /// Rank at each position.
    ranks: Arc<[u32]>,
    /// Each rank's position.
    positions: Arc<[u32]>,
}

impl PlacedHdrm {
    /// Schedule for ranks in this order.
    ///
    /// # Errors
    /// [`Error::RankPlacement`] if `order` does not permute the numbers below its length, or is empty.
    pub fn new(order: &[u32]) -> Result<PlacedHdrm, Error> {
        let mut positions = vec![None; order.len()];
        for (position, &rank) in (0..).zip(order) {
            let free = positions.get_mut(rank as usize).filter(|place| place.is_none());
            let text = || format!("has rank {rank} twice, or not below {}", order.len());
            *free.ok_or_else(|| Error::RankPlacement(text()))? = Some(position);
        }
        if order.is_empty() {
            return Err(Error::RankPlacement("has no rank".to_owned()));
        }
        let schedule = HalvingDoubling::new(order.len() as u32, true);
        let positions = positions.into_iter().flatten().collect();
        Ok(PlacedHdrm { schedule, ranks: order.into(), positions })
    }

    /// Rank at each position.
    pub fn order(&self) -> &[u32] {
        &self.ranks
    }

    fn position(&self, rank: Rank) -> Rank {
        Rank(self.positions[rank.0 as usize])
    }

    fn at(&self, position: Rank) -> Rank {
        Rank(self.ranks[position.0 as usize])
    }
}

impl Schedule for PlacedHdrm {
    fn name(&self) -> &str {
        self.schedule.name()
    }

    fn collective(&self) -> Collective {
        Collective::AllReduce
    }

    fn ranks(&self) -> u32 {
        self.schedule.ranks()
    }

    fn blocks(&self) -> u32 {
        self.schedule.blocks()
    }

    fn scratch_blocks(&self, rank: Rank) -> u32 {
        self.schedule.scratch_blocks(self.position(rank))
    }

    fn steps(&self) -> u32 {
        self.schedule.steps()
    }

    fn lanes(&self) -> u32 {
        self.schedule.lanes()
    }

    fn len(&self, rank: Rank) -> u32 {
        self.schedule.len(self.position(rank))
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        match self.schedule.op(self.position(rank), index) {
            Op::Write { to, source, target, lane, step } => {
                Op::Write { to: self.at(to), source, target, lane, step }
            }
            Op::Wait { from, lane, count } => Op::Wait { from: self.at(from), lane, count },
            Op::Drain { to } => Op::Drain { to: self.at(to) },
            local @ (Op::Reduce { .. } | Op::Copy { .. }) => local,
        }
    }
}
