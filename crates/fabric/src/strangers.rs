//! Connections whose other end has not proved a rank: a bounded queue, oldest first.
//!
//! A port is open to every process that can reach it, so the number of such connections and the time
//! that each may stay silent are bounded: the oldest makes room for a newer one, and each expires.

use crate::types::Time;
use std::collections::{HashSet, VecDeque};
use std::time::Duration;

/// Connections that a queue holds at most.
pub(crate) const MAX_STRANGERS: usize = 128;
/// How long a connection may take to prove a rank.
pub(crate) const HELLO_TIME: Duration = Duration::from_secs(2);

/// The queue. `S` is a connection.
#[derive(Debug)]
pub(crate) struct Strangers<S> {
    queue: VecDeque<Stranger<S>>,
    next_id: u64,
    /// Reasons of refusals so far.
    reasons: HashSet<&'static str>,
}

#[derive(Debug)]
struct Stranger<S> {
    id: u64,
    connection: S,
    expires: Time,
}

impl<S> Strangers<S> {
    pub fn new() -> Strangers<S> {
        Strangers { queue: VecDeque::new(), next_id: 0, reasons: HashSet::new() }
    }

    /// Adds a connection that was accepted at `now`; returns its id, and the oldest one if that had to
    /// make room.
    pub fn add(&mut self, connection: S, now: Time) -> (u64, Option<S>) {
        let dropped = if self.queue.len() < MAX_STRANGERS { None } else { self.drop_oldest() };
        let id = self.next_id;
        self.next_id += 1;
        self.queue.push_back(Stranger { id, connection, expires: now.after(HELLO_TIME) });
        (id, dropped)
    }

    /// Removes the oldest connection.
    pub fn drop_oldest(&mut self) -> Option<S> {
        self.queue.pop_front().map(|stranger| stranger.connection)
    }

    /// Removes a connection whose time is over at `now`; called until there is none.
    pub fn drop_expired(&mut self, now: Time) -> Option<S> {
        self.next_expiry().filter(|expires| *expires <= now)?;
        self.drop_oldest()
    }

    /// When the oldest connection expires.
    pub fn next_expiry(&self) -> Option<Time> {
        self.queue.front().map(|stranger| stranger.expires)
    }

    /// The connection of this id.
    pub fn get_mut(&mut self, id: u64) -> Option<&mut S> {
        let index = self.index(id)?;
        Some(&mut self.queue[index].connection)
    }

    /// Removes the connection of this id.
    pub fn take(&mut self, id: u64) -> Option<S> {
        let index = self.index(id)?;
        self.queue.remove(index).map(|stranger| stranger.connection)
    }

    /// Ids and connections, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &S)> {
        self.queue.iter().map(|stranger| (stranger.id, &stranger.connection))
    }

    /// Records a refusal; returns whether it is the first for this reason, which is the one to log.
    pub fn is_new_reason(&mut self, reason: &'static str) -> bool {
        self.reasons.insert(reason)
    }

    /// Ids rise along the queue.
    fn index(&self, id: u64) -> Option<usize> {
        self.queue.binary_search_by_key(&id, |stranger| stranger.id).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_makes_room_for_a_newer_one() {
        let mut strangers = Strangers::new();
        for number in 0..MAX_STRANGERS as u64 {
            assert_eq!(strangers.add(number, Time(0)), (number, None));
        }
        assert_eq!(strangers.take(1), Some(1));
        assert_eq!(strangers.add(1000, Time(0)), (128, None));
        assert_eq!(strangers.add(2000, Time(0)), (129, Some(0)));
        assert_eq!(strangers.add(3000, Time(0)), (130, Some(2)));
        assert_eq!(strangers.get_mut(129), Some(&mut 2000));
        assert!(strangers.get_mut(2).is_none() && strangers.take(1).is_none());
        assert_eq!(strangers.iter().count(), MAX_STRANGERS);
    }

    #[test]
    fn each_expires_when_its_own_time_is_over() {
        let mut strangers = Strangers::new();
        let (first, second) = (Time(0), Time(0).after(Duration::from_secs(1)));
        strangers.add('a', first);
        strangers.add('b', second);
        let over = first.after(HELLO_TIME);
        assert_eq!(strangers.next_expiry(), Some(over));
        assert_eq!(strangers.drop_expired(Time(over.0 - 1)), None);
        assert_eq!(strangers.drop_expired(over), Some('a'));
        assert_eq!(strangers.drop_expired(over), None);
        assert_eq!(strangers.drop_expired(second.after(HELLO_TIME)), Some('b'));
        assert_eq!(strangers.next_expiry(), None);
    }

    #[test]
    fn a_reason_is_new_once() {
        let mut strangers = Strangers::<()>::new();
        assert!(strangers.is_new_reason("a") && strangers.is_new_reason("b"));
        assert!(!strangers.is_new_reason("a"));
    }
}
