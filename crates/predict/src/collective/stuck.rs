//! Why a schedule does not end.

use std::collections::HashSet;

use weft_collectives::{Op, Rank, Schedule};

use super::execution::{Execution, Waiting};
use crate::error::Error;

impl<S: Schedule> Execution<S> {
    /// The error for a schedule whose ranks wait and for whom nothing is under way. It names the rank
    /// where the chain of waits ends: one that waits for a rank that is done, or the first of a circle.
    pub fn deadlock(&self) -> Error {
        let stands = |rank: &u32| self.lane_of(*rank).is_some();
        let standing: Vec<u32> = (0..self.schedule().ranks()).filter(stands).collect();
        let Some(first) = standing.first() else {
            return Error::Nothing;
        };
        let mut seen = HashSet::new();
        let mut rank = *first;
        while let Some((from, _, _)) = self.lane_of(rank)
            && seen.insert(rank)
            && self.lane_of(from).is_some()
        {
            rank = from;
        }
        let (from, lane, count) = self.lane_of(rank).unwrap_or((rank, 0, 0));
        let does = match self.lane_of(from) {
            Some((other, ..)) => format!("which itself waits for rank {other}"),
            None => "which has nothing left to write".to_string(),
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
