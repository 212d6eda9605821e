//! Connections that a turn of a service's thread visits: all, or with many connections those that have work.

use super::sleeper::{Sleeper, Watched};
use std::time::Duration;
use weft_fabric::Time;

/// Number of connections of which epoll reports events up to which every turn visits all.
const FEW: usize = 8;
/// Time from one visit of all connections to the next. Losses, departures and what epoll does not report are seen then.
const INTERVAL: Duration = Duration::from_micros(500);

/// Choice of connections of the current turn.
#[derive(Debug, Default)]
pub(super) struct Visits {
    /// Time of the next visit of all.
    all_at: Time,
    /// Connections of which epoll reports events, in order; unused if the turn visits all.
    ready: Vec<u64>,
    /// Connections to visit in the next turn, whose last visit left messages.
    unread: Vec<u64>,
    visits_all: bool,
}

impl Visits {
    /// Begins a turn with these connections.
    pub fn begin<'a>(
        &mut self,
        now: Time,
        connections: impl Iterator<Item = &'a Watched>,
        sleeper: &Sleeper,
    ) {
        let reported = connections.filter(|connection| connection.is_reported).count();
        self.visits_all = reported <= FEW || now >= self.all_at;
        self.ready.clear();
        if self.visits_all {
            self.all_at = now.after(INTERVAL);
            self.unread.clear();
        } else {
            self.ready.append(&mut self.unread);
            sleeper.ready(|id| self.ready.push(id));
            self.ready.sort_unstable();
        }
    }

    /// True if this turn may visit some connections alone.
    pub fn may_skip(&self) -> bool {
        !self.visits_all
    }

    /// The next turn visits this connection, too.
    pub fn again(&mut self, connection: &Watched) {
        self.unread.push(connection.id);
    }

    /// The next turn visits all connections.
    pub fn all_next(&mut self) {
        self.all_at = Time(0);
    }

    /// True for a connection whose events are to be taken in this turn.
    pub fn has(&self, connection: &Watched) -> bool {
        self.visits_all || !connection.is_reported || self.is_ready(connection)
    }

    /// True for a connection of which epoll has reported events.
    pub fn is_ready(&self, connection: &Watched) -> bool {
        self.ready.binary_search(&connection.id).is_ok()
    }
}
