//! Connections that a service thread visits in a turn: all, or with many connections those that have work.

use super::sleeper::{Sleeper, Watched};
use std::time::Duration;
use weft_fabric::Time;

/// Maximum number of connections with epoll at which every turn visits all.
const FEW: usize = 8;
/// Shortest time between visits to all connections. Losses, departures and what epoll does not report are seen then.
const INTERVAL: Duration = Duration::from_micros(500);
/// That time, in durations of the visit before: visiting all takes at most 1/17 of a thread's time.
const REST: u32 = 16;
/// Longest such time, above that share.
const MAX_INTERVAL: Duration = Duration::from_secs(1);

/// Connections to visit in the current turn.
#[derive(Debug, Default)]
pub(super) struct Visits {
    /// Next time to visit all.
    all_at: Time,
    /// Start of a visit to all that is not every turn's; `None` after it has ended.
    began: Option<Time>,
    /// Connections for which epoll reports events, in order; unused if the turn visits all.
    ready: Vec<u64>,
    /// Connections to visit in the next turn, whose last visit left messages.
    unread: Vec<u64>,
    visits_all: bool,
}

impl Visits {
    /// Begins a turn with these connections; [`Visits::end`] follows.
    pub fn begin<'a>(
        &mut self,
        now: Time,
        connections: impl Iterator<Item = &'a Watched>,
        sleeper: &Sleeper,
    ) {
        let reported = connections.filter(|connection| connection.is_reported).count();
        self.visits_all = reported <= FEW || now >= self.all_at;
        self.began = (self.visits_all && reported > FEW).then_some(now);
        self.ready.clear();
        if self.visits_all {
            self.unread.clear();
        } else {
            self.ready.append(&mut self.unread);
            sleeper.ready(|id| self.ready.push(id));
            self.ready.sort_unstable();
        }
    }

    /// Ends a turn's visits. Reads the clock if all connections were visited and there are many.
    pub fn end(&mut self, clock: impl FnOnce() -> Time) {
        let Some(began) = self.began.take() else { return };
        let end = clock();
        let rest = end.since(began).saturating_mul(REST);
        self.all_at = end.after(rest.clamp(INTERVAL, MAX_INTERVAL));
    }

    /// True if this turn may visit only some connections.
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

    /// True for a connection that has, or may have, messages; always false if the turn visits all.
    pub fn is_ready(&self, connection: &Watched) -> bool {
        self.ready.binary_search(&connection.id).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::ServiceConfig;
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd;
    use weft_fabric::Rank;

    /// Turns over a number of connections for which epoll reports no event.
    struct Turns {
        visits: Visits,
        connections: Vec<Watched>,
        sleeper: Sleeper,
    }

    impl Turns {
        fn new(connections: usize) -> Turns {
            let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            let sleeper = Sleeper::new(ServiceConfig::default(), event.as_fd()).unwrap();
            let watched = |id| Watched { id, peer: Rank(1), is_reported: true, is_mapped: false };
            let connections = (1..=connections as u64).map(watched).collect();
            Turns { visits: Visits::default(), connections, sleeper }
        }

        /// Begins a turn; true if it visits all connections.
        fn begin(&mut self, now: Time) -> bool {
            self.visits.begin(now, self.connections.iter(), &self.sleeper);
            !self.visits.may_skip()
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "descriptors that miri lacks")]
    fn a_visit_of_all_is_followed_by_sixteen_times_its_duration_without_one() {
        let ms = Duration::from_millis;
        for (duration, rest) in [
            (Duration::ZERO, INTERVAL),
            (Duration::from_micros(10), INTERVAL),
            (INTERVAL, ms(8)),
            (ms(3), ms(48)),
            (ms(100), MAX_INTERVAL),
        ] {
            let mut turns = Turns::new(FEW + 1);
            let mut now = Time(1_000_000_000);
            for _ in 0..3 {
                assert!(turns.begin(now));
                let end = now.after(duration);
                turns.visits.end(|| end);
                now = end.after(rest);
                for early in [end, Time(now.0 - 1)] {
                    assert!(!turns.begin(early), "{duration:?}");
                    turns.visits.end(|| panic!("read of the clock"));
                }
            }
            turns.visits.all_next();
            assert!(turns.begin(Time(now.0 - 1)));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "descriptors that miri lacks")]
    fn few_connections_are_visited_in_every_turn_without_a_read_of_the_clock() {
        let mut turns = Turns::new(FEW);
        for now in [Time(1), Time(1), Time(2)] {
            assert!(turns.begin(now));
            turns.visits.end(|| panic!("read of the clock"));
        }
    }
}
