//! Rows between ranks in a round, by the planner.

use weft_moe::routing::Load;
use weft_moe::{Area, CombineMode, SendPlan};

use super::job::{Copies, MoeJob};
use crate::error::Error;
use crate::progress::Progress;

/// Traffic in one round.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    ranks: u32,
    /// Dispatch rows, equal to the combine replies: `[source][destination]`.
    rows: Vec<u32>,
}

/// Header, row and reply bytes, and the expert load over all rounds.
#[derive(Clone, Debug)]
pub(crate) struct RowSizes {
    pub header_bytes: u64,
    pub row_bytes: u64,
    pub answer_bytes: u64,
    pub private_rows: u32,
    pub load: Load,
}

impl RowSizes {
    pub fn new(job: &MoeJob) -> Result<RowSizes, Error> {
        let shape = job.shape(0)?;
        let record = match job.copies {
            Copies::Rank => u64::from(shape.sizes().extent(Area::Metadata).stride),
            // A copy for one expert has scales and no expert list.
            Copies::Expert => shape.scale_bytes() as u64,
        };
        let config = shape.config();
        Ok(RowSizes {
            header_bytes: shape.sizes().extent(Area::SendHeader).stride.into(),
            row_bytes: shape.token_bytes() as u64 + record,
            answer_bytes: shape.row_bytes(config.reply_dtype) as u64,
            private_rows: config.private_rows,
            load: Load::new(shape.placement()),
        })
    }
}

impl Traffic {
    /// Plans a round for all ranks, and adds to the load. The progress callback can cancel it.
    pub fn plan(
        job: &MoeJob,
        seed: u64,
        plan: &mut SendPlan,
        round: u32,
        load: &mut Load,
        progress: &mut Progress<'_>,
    ) -> Result<Traffic, Error> {
        let mut rows = Vec::with_capacity((job.ranks * job.ranks) as usize);
        for rank in 0..job.ranks {
            if !progress(0.0, "planning") {
                return Err(Error::Cancelled { time_s: 0.0 });
            }
            plan.build(&job.ids(seed, rank, round), None)?;
            load.add(plan.rows_to_rank(), plan.rows_of_expert());
            match plan.shape().config().combine {
                CombineMode::ReduceAtExpert => rows.extend_from_slice(plan.rows_to_rank()),
                CombineMode::PerExpert => {
                    rows.extend((0..job.ranks).map(|to| plan.pairs_for(to).len() as u32));
                }
            }
        }
        Ok(Traffic { ranks: job.ranks, rows })
    }

    /// Rows from one rank to another.
    pub fn rows(&self, source: u32, destination: u32) -> u32 {
        self.rows[(source * self.ranks + destination) as usize]
    }

    /// Rows that a rank sends to peers.
    pub fn sent(&self, source: u32) -> u64 {
        self.sent_where(source, |_| true)
    }

    /// Rows that a rank sends to the peers that `such` selects.
    pub fn sent_where(&self, source: u32, such: impl Fn(u32) -> bool) -> u64 {
        let peers = self.peers(source).filter(|peer| such(*peer));
        peers.map(|peer| u64::from(self.rows(source, peer))).sum()
    }

    /// Rows that a rank receives from peers.
    pub fn received(&self, destination: u32) -> u64 {
        self.peers(destination).map(|peer| u64::from(self.rows(peer, destination))).sum()
    }

    fn peers(&self, rank: u32) -> impl Iterator<Item = u32> + use<> {
        (0..self.ranks).filter(move |peer| *peer != rank)
    }
}
