//! What others see of an execution.

use std::collections::VecDeque;

use weft_collectives::Schedule;

use super::execution::Execution;
use super::rank::{RankState, Waiting};
use crate::trace::Span;
use crate::world::World;

impl<S: Schedule> Execution<S> {
    /// Whether a rank waits for another one.
    pub fn stands(&self) -> bool {
        self.ranks.iter().any(|rank| matches!(rank.waiting, Waiting::Lane { .. }))
    }

    /// What a rank stands at.
    pub fn waiting(&self, rank: u32) -> Waiting {
        self.ranks[rank as usize].waiting
    }

    /// Which operation a rank stands at.
    pub fn op(&self, rank: u32) -> u32 {
        self.ranks[rank as usize].op
    }

    /// Who sends over a connection.
    pub fn sender(&self, connection: u32) -> u32 {
        self.connections.list[connection as usize].from
    }

    /// Whose write has this tag.
    pub fn describe(&self, tag: u64) -> String {
        let connection = &self.connections.list[tag as u32 as usize];
        format!("rank {} to rank {}", connection.from, connection.to)
    }

    /// The share of operations that are done.
    pub fn progress(&self) -> f64 {
        let rounds = f64::from(self.vectors.rounds());
        let done = |state: &RankState| {
            f64::from(state.round) + f64::from(state.op) / f64::from(state.len.max(1))
        };
        let sum: f64 = self.ranks.iter().map(done).sum();
        (sum / rounds / self.ranks.len() as f64).min(1.0)
    }

    /// Records a write that has arrived.
    pub(super) fn trace_write(&mut self, world: &mut World, number: u32) {
        let connection = &self.connections.list[number as usize];
        let (rank, name) = (connection.from, format!("to {}", connection.to));
        let end_s = world.now();
        let posted = self.posted.get_mut(number as usize).and_then(VecDeque::pop_front);
        let (begin_s, bytes) = posted.unwrap_or((end_s, 0));
        world.span(Span { job: 0, rank, row: "network", name, begin_s, end_s, bytes });
    }
}
