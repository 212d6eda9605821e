//! Queue for accepted connections that have not proved a rank: bounded, oldest first.
//!
//! Any process that reaches the port can connect, so both the number and the lifetime of such connections
//! are bounded: a new connection beyond the limit evicts the oldest, and each expires.

use crate::types::Time;
use std::collections::{HashSet, VecDeque};
use std::time::Duration;

/// Connection limit in a queue.
pub(crate) const MAX_UNPROVEN: usize = 128;
/// Time for a connection to prove a rank.
pub(crate) const HELLO_TIME: Duration = Duration::from_secs(2);

/// Longest connection life, however long the owner was busy.
pub(crate) const MAX_LIFE: Duration = Duration::from_secs(30);

/// Unproven connections, each an `S`.
#[derive(Debug)]
pub(crate) struct UnprovenConnections<S> {
    queue: VecDeque<UnprovenConnection<S>>,
    next_id: u64,
    /// Rejection reasons so far.
    reasons: HashSet<&'static str>,
}

#[derive(Debug)]
struct UnprovenConnection<S> {
    id: u64,
    connection: S,
    accepted: Time,
    expires: Time,
}

impl<S> UnprovenConnections<S> {
    pub fn new() -> UnprovenConnections<S> {
        UnprovenConnections { queue: VecDeque::new(), next_id: 0, reasons: HashSet::new() }
    }

    /// Adds a connection accepted at `now`; returns an id for it, and the oldest connection if it was
    /// evicted.
    pub fn add(&mut self, connection: S, now: Time) -> (u64, Option<S>) {
        let dropped = if self.queue.len() < MAX_UNPROVEN { None } else { self.drop_oldest() };
        let id = self.next_id;
        self.next_id += 1;
        let expires = now.after(HELLO_TIME);
        self.queue.push_back(UnprovenConnection { id, connection, accepted: now, expires });
        (id, dropped)
    }

    /// Removes the oldest connection.
    pub fn drop_oldest(&mut self) -> Option<S> {
        self.queue.pop_front().map(|entry| entry.connection)
    }

    /// Removes one connection that has expired at `now`; call it until it returns `None`.
    pub fn drop_expired(&mut self, now: Time) -> Option<S> {
        self.next_expiry().filter(|expires| *expires <= now)?;
        self.drop_oldest()
    }

    /// Extends the time for all connections by as long as the owner was busy, to [`MAX_LIFE`] at most.
    pub fn postpone(&mut self, busy: Duration) {
        for entry in &mut self.queue {
            entry.expires = entry.expires.after(busy).min(entry.accepted.after(MAX_LIFE));
        }
    }

    /// Time at which the oldest connection expires.
    pub fn next_expiry(&self) -> Option<Time> {
        self.queue.front().map(|entry| entry.expires)
    }

    /// The connection with this id.
    pub fn get_mut(&mut self, id: u64) -> Option<&mut S> {
        let index = self.index(id)?;
        Some(&mut self.queue[index].connection)
    }

    /// Removes the connection with this id.
    pub fn take(&mut self, id: u64) -> Option<S> {
        let index = self.index(id)?;
        self.queue.remove(index).map(|entry| entry.connection)
    }

    /// Ids and connections, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &S)> {
        self.queue.iter().map(|entry| (entry.id, &entry.connection))
    }

    /// Records a rejection; returns true for the first with this reason, which is the one to log.
    pub fn is_new_reason(&mut self, reason: &'static str) -> bool {
        self.reasons.insert(reason)
    }

    /// Index for an id; ids ascend along the queue.
    fn index(&self, id: u64) -> Option<usize> {
        self.queue.binary_search_by_key(&id, |entry| entry.id).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_connection_beyond_the_limit_evicts_the_oldest() {
        let mut unproven = UnprovenConnections::new();
        for number in 0..MAX_UNPROVEN as u64 {
            assert_eq!(unproven.add(number, Time(0)), (number, None));
        }
        assert_eq!(unproven.take(1), Some(1));
        assert_eq!(unproven.add(1000, Time(0)), (128, None));
        assert_eq!(unproven.add(2000, Time(0)), (129, Some(0)));
        assert_eq!(unproven.add(3000, Time(0)), (130, Some(2)));
        assert_eq!(unproven.get_mut(129), Some(&mut 2000));
        assert!(unproven.get_mut(2).is_none() && unproven.take(1).is_none());
        assert_eq!(unproven.iter().count(), MAX_UNPROVEN);
    }

    #[test]
    fn each_expires_when_its_own_time_is_over() {
        let mut unproven = UnprovenConnections::new();
        let (first, second) = (Time(0), Time(0).after(Duration::from_secs(1)));
        unproven.add('a', first);
        unproven.add('b', second);
        let over = first.after(HELLO_TIME);
        assert_eq!(unproven.next_expiry(), Some(over));
        assert_eq!(unproven.drop_expired(Time(over.0 - 1)), None);
        assert_eq!(unproven.drop_expired(over), Some('a'));
        assert_eq!(unproven.drop_expired(over), None);
        assert_eq!(unproven.drop_expired(second.after(HELLO_TIME)), Some('b'));
        assert_eq!(unproven.next_expiry(), None);
    }

    #[test]
    fn the_time_of_a_busy_owner_is_not_that_of_its_connections() {
        let mut unproven = UnprovenConnections::new();
        unproven.add('a', Time(0));
        unproven.postpone(HELLO_TIME);
        let (before, busy) = (Time(0).after(HELLO_TIME), Time(0).after(2 * HELLO_TIME));
        unproven.add('b', before);
        assert_eq!(unproven.drop_expired(before), None);
        assert_eq!(unproven.drop_expired(busy), Some('a'));
        assert_eq!(unproven.drop_expired(busy), Some('b'));
    }

    #[test]
    fn a_connection_ends_after_its_longest_life_however_busy_its_owner_is() {
        let mut unproven = UnprovenConnections::new();
        unproven.add('a', Time(0));
        unproven.postpone(2 * MAX_LIFE);
        unproven.add('b', Time(1));
        unproven.postpone(2 * MAX_LIFE);
        let over = Time(0).after(MAX_LIFE);
        assert_eq!(unproven.drop_expired(Time(over.0 - 1)), None);
        assert_eq!(unproven.drop_expired(over), Some('a'));
        assert_eq!(unproven.drop_expired(over), None);
        assert_eq!(unproven.drop_expired(Time(over.0 + 1)), Some('b'));
    }

    #[test]
    fn a_reason_is_new_once() {
        let mut unproven = UnprovenConnections::<()>::new();
        assert!(unproven.is_new_reason("a") && unproven.is_new_reason("b"));
        assert!(!unproven.is_new_reason("a"));
    }
}
