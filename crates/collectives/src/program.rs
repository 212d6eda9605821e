//! Program: a schedule with all operations stored.

use crate::op::{Collective, Op, Rank};
use crate::schedule::Schedule;
use serde::{Deserialize, Serialize};

/// Stored schedule: copied from any other, written by hand, or read from JSON.
///
/// The fields are unchecked; [`verify`](crate::verify()) proves that they compute the collective.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// Algorithm name.
    pub name: String,
    /// Computed collective.
    pub collective: Collective,
    /// Number of blocks in the vector.
    pub blocks: u32,
    /// Scratch slots on each rank.
    pub scratch_blocks: Vec<u32>,
    /// Step count.
    pub steps: u32,
    /// Number of lanes from one rank to another.
    pub lanes: u32,
    /// Operations on each rank.
    #[serde(rename = "operations")]
    pub ops: Vec<Vec<Op>>,
}

impl Program {
    /// Stores all operations in a schedule.
    pub fn new(schedule: &impl Schedule) -> Program {
        let ranks = || (0..schedule.ranks()).map(Rank);
        Program {
            name: schedule.name().to_owned(),
            collective: schedule.collective(),
            blocks: schedule.blocks(),
            scratch_blocks: ranks().map(|rank| schedule.scratch_blocks(rank)).collect(),
            steps: schedule.steps(),
            lanes: schedule.lanes(),
            ops: ranks()
                .map(|rank| (0..schedule.len(rank)).map(|i| schedule.op(rank, i)).collect())
                .collect(),
        }
    }
}

impl Schedule for Program {
    fn name(&self) -> &str {
        &self.name
    }

    fn collective(&self) -> Collective {
        self.collective
    }

    fn ranks(&self) -> u32 {
        self.ops.len() as u32
    }

    fn blocks(&self) -> u32 {
        self.blocks
    }

    fn scratch_blocks(&self, rank: Rank) -> u32 {
        self.scratch_blocks.get(rank.0 as usize).copied().unwrap_or(0)
    }

    fn steps(&self) -> u32 {
        self.steps
    }

    fn lanes(&self) -> u32 {
        self.lanes
    }

    fn len(&self, rank: Rank) -> u32 {
        self.ops[rank.0 as usize].len() as u32
    }

    fn op(&self, rank: Rank, index: u32) -> Op {
        self.ops[rank.0 as usize][index as usize]
    }
}
