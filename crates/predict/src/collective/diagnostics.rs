//! Execution diagnostics: progress, flow names, deadlocks.

use weft_collectives::{Op, Rank, Schedule};

use super::execution::Execution;
use super::rank::{RankCursor, WaitState};
use crate::error::Error;

impl<S: Schedule> Execution<S> {
    /// True if a rank is blocked on a lane.
    pub fn is_blocked(&self) -> bool {
        self.ranks.iter().any(|rank| matches!(rank.waiting, WaitState::Lane { .. }))
    }

    /// A rank's state.
    pub fn waiting(&self, rank: u32) -> WaitState {
        self.ranks[rank as usize].waiting
    }

    /// A rank's current operation.
    pub fn op(&self, rank: u32) -> u32 {
        self.ranks[rank as usize].op
    }

    /// A connection's source rank.
    pub fn sender(&self, connection: u32) -> u32 {
        self.connections.list[connection as usize].from
    }

    /// Name of the flow `tag`.
    pub fn flow_name(&self, tag: u64) -> String {
        let connection = &self.connections.list[tag as u32 as usize];
        format!("rank {} to rank {}", connection.from, connection.to)
    }

    /// Completed share of the operations.
    pub fn progress(&self) -> f64 {
        let rounds = f64::from(self.vectors.segments());
        let done = |state: &RankCursor| {
            f64::from(state.segment) + f64::from(state.op) / f64::from(state.len.max(1))
        };
        let sum: f64 = self.ranks.iter().map(done).sum();
        (sum / rounds / self.ranks.len() as f64).min(1.0)
    }

    /// Error for blocked ranks without a write in flight. It names a rank whose awaited write is never posted;
    /// without one, ranks block each other in a cycle, and it names the one with the least progress.
    pub fn deadlock(&self) -> Error {
        let blocked: Vec<u32> = (0..self.schedule().ranks())
            .filter(|rank| self.awaited_lane(*rank).is_some())
            .collect();
        let lost = blocked.iter().find(|rank| !self.has_pending_write(**rank));
        let least = || blocked.iter().min_by_key(|rank| (self.step(**rank), **rank));
        let Some(&rank) = lost.or_else(least) else {
            return Error::NoWorkload;
        };
        let (from, lane, count) = self.awaited_lane(rank).unwrap_or((rank, 0, 0));
        let does = match (lost, self.awaited_lane(from)) {
            (Some(_), _) => "which posts no further write on it".to_string(),
            (None, Some((other, ..))) => format!("which is blocked on rank {other}"),
            (None, None) => "which is blocked".to_string(),
        };
        let rises = if count == 1 { String::new() } else { format!(" for the {count}th time") };
        Error::Deadlock {
            schedule: self.schedule().name().to_string(),
            rank,
            op: self.op(rank),
            step: self.step(rank),
            waits: format!("waiting for rank {from} to raise lane {lane}{rises}, {does}"),
            others: blocked.len() as u32 - 1,
        }
    }

    /// True if the awaited peer still has a write that raises the lane.
    fn has_pending_write(&self, rank: u32) -> bool {
        let Some((from, awaited, _)) = self.awaited_lane(rank) else { return true };
        let rises = |index| match self.schedule().op(Rank(from), index) {
            Op::Write { to, lane, .. } => to.0 == rank && lane == awaited,
            _ => false,
        };
        (self.op(from)..self.schedule().len(Rank(from))).any(rises)
    }

    /// Peer, lane and count that a blocked rank waits for.
    fn awaited_lane(&self, rank: u32) -> Option<(u32, u32, u32)> {
        match self.waiting(rank) {
            WaitState::Lane { connection, lane, count } => {
                Some((self.sender(connection), lane, count))
            }
            _ => None,
        }
    }

    /// A rank's current step: the last write's step, or the next one's before the first.
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
