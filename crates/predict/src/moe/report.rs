//! Results: time in each phase, rows by link kind.

use serde_json::{Value, json};

use super::job::MoeJob;
use super::traffic::{RowSizes, Traffic};
use crate::statistics::Summary;

/// Round half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Dispatch,
    Combine,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Phase::Dispatch => "dispatch",
            Phase::Combine => "combine",
        }
    }
}

/// Seconds from call to end, for every rank and round.
#[derive(Clone, Debug, Default)]
pub(crate) struct PhaseTimes {
    dispatch: Vec<f64>,
    combine: Vec<f64>,
}

impl PhaseTimes {
    pub fn add(&mut self, phase: Phase, seconds: f64) {
        match phase {
            Phase::Dispatch => self.dispatch.push(seconds),
            Phase::Combine => self.combine.push(seconds),
        }
    }

    pub fn report(&self, job: &MoeJob, sizes: &RowSizes, traffic: &[Traffic]) -> Value {
        let (mut by_nic, mut by_nvlink, mut kept) = (0u64, 0u64, 0u64);
        for round in traffic {
            for source in 0..job.ranks {
                for destination in 0..job.ranks {
                    let rows = u64::from(round.rows(source, destination));
                    if source == destination {
                        kept += rows;
                    } else if job.same_domain(source, destination) {
                        by_nvlink += rows;
                    } else {
                        by_nic += rows;
                    }
                }
            }
        }
        let of_a_rank = |rows: u64| rows as f64 / f64::from(job.ranks * job.rounds);
        json!({
            "dispatch": Summary::of(&self.dispatch),
            "combine": Summary::of(&self.combine),
            "rounds": job.rounds,
            "row_bytes": sizes.row_bytes,
            "answer_bytes": sizes.answer_bytes,
            "header_bytes": sizes.header_bytes,
            "rows_per_rank": {
                "nic": of_a_rank(by_nic), "nvlink": of_a_rank(by_nvlink), "kept": of_a_rank(kept),
            },
            "expert_imbalance": sizes.load.expert_imbalance(),
            "rank_imbalance": sizes.load.rank_imbalance(),
        })
    }
}
