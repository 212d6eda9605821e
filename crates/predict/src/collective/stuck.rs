//! Why a schedule does not end.

use weft_collectives::{Op, Rank, Schedule};

use super::execution::Execution;
use super::rank::Waiting;
use crate::error::Error;

impl<S: Schedule> Execution<S> {
    /// The error for a schedule whose ranks wait and for whom nothing is under way. It names a rank that
    /// waits for a write that nobody will post any more; if there is none, ranks wait for each other in a
    /// circle, and it names the one that has come least far.
    pub fn deadlock(&self) -> Error {
        let standing: Vec<u32> =
            (0..self.schedule().ranks()).filter(|rank| self.lane_of(*rank).is_some()).collect();
        let lost = standing.iter().find(|rank| !self.is_still_to_come(**rank));
        let least = || standing.iter().min_by_key(|rank| (self.step(**rank), **rank));
        let Some(&rank) = lost.or_else(least) else {
            return Error::Nothing;
        };
        let (from, lane, count) = self.lane_of(rank).unwrap_or((rank, 0, 0));
        let does = match (lost, self.lane_of(from)) {
            (Some(_), _) => "which has no write left that does".to_string(),
            (None, Some((other, ..))) => format!("which itself waits for rank {other}"),
            (None, None) => "which stands".to_string(),
        };
        let rises = if count == 1 { String::new() } else { format!(" for the {count}th time") };
        Error::Deadlock {
            schedule: self.schedule().name().to_string(),
            rank,
            op: self.op(rank),
            step: self.step(rank),
            waits: format!("waiting for rank {from} to raise lane {lane}{rises}, {does}"),
            others: standing.len() as u32 - 1,
        }
    }

    /// Whether whom a rank waits for has a write left that raises the lane.
    fn is_still_to_come(&self, rank: u32) -> bool {
        let Some((from, awaited, _)) = self.lane_of(rank) else { return true };
        let rises = |index| match self.schedule().op(Rank(from), index) {
            Op::Write { to, lane, .. } => to.0 == rank && lane == awaited,
            _ => false,
        };
        (self.op(from)..self.schedule().len(Rank(from))).any(rises)
    }

    /// What a rank waits for: whose lane, which, and how often it must have risen.
    fn lane_of(&self, rank: u32) -> Option<(u32, u32, u32)> {
        match self.waiting(rank) {
            Waiting::Lane { connection, lane, count } => {
                Some((self.sender(connection), lane, count))
            }
            _ => None,
        }
    }

    /// The step that a rank is in: of its last write, or of its next one if there was none.
    fn step(&self, rank: u32) -> u32 {
        let step = |index| match self.schedule().op(Rank(rank), index) {
            Op::Write { step, .. } => Some(step),
            _ => None,
        };
        let last = self.schedule().len(Rank(rank));
        let at = self.op(rank).min(last);
        (0..at).rev().find_map(step).or_else(|| (at..last).find_map(step)).unwrap_or(0)
    }
}
