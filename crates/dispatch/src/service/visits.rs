//! Connections that a turn of a service's thread visits: all, or with many connections those that have work.

use super::sleeper::{Sleeper, Watched};
use std::collections::HashSet;

/// Number of connections of which epoll reports events up to which every turn visits all.
const FEW: usize = 8;
/// Turns from one visit of all connections to the next. Losses, departures and what epoll does not report are seen then.
const INTERVAL: u32 = 32;

/// Choice of connections of the current turn.
#[derive(Debug, Default)]
pub(super) struct Visits {
    turns: u32,
    /// Connections of which epoll reports events; unused if the turn visits all.
    ready: HashSet<u64>,
    /// Connections to visit in the next turn, whose last visit left messages.
    unread: HashSet<u64>,
    visits_all: bool,
}

impl Visits {
    /// Begins a turn with these connections.
    pub fn begin<'a>(&mut self, connections: impl Iterator<Item = &'a Watched>, sleeper: &Sleeper) {
        let reported = connections.filter(|connection| connection.is_reported).count();
        self.visits_all = reported <= FEW || self.turns == 0;
        self.turns = (self.turns + 1) % INTERVAL;
        if self.visits_all {
            self.unread.clear();
        } else {
            std::mem::swap(&mut self.ready, &mut self.unread);
            self.unread.clear();
            sleeper.ready(|id| _ = self.ready.insert(id));
        }
    }

    /// True if this turn may visit some connections alone.
    pub fn may_skip(&self) -> bool {
        !self.visits_all
    }

    /// The next turn visits this connection, too.
    pub fn again(&mut self, connection: &Watched) {
        self.unread.insert(connection.id);
    }

    /// The next turn visits all connections.
    pub fn all_next(&mut self) {
        self.turns = 0;
    }

    /// True for a connection whose events are to be taken in this turn.
    pub fn has(&self, connection: &Watched) -> bool {
        self.visits_all || !connection.is_reported || self.ready.contains(&connection.id)
    }
}
