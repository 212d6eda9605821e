//! Submissions that wait for a place in the ledger: order, deadlines, cancels.

use super::query::Query;
use crate::ledger::{Failure, Notice, Outcome, QueryId};
use std::time::Duration;
use weft_fabric::{QueueReceiver, Time};

/// Shortest and longest time between two searches for deadlines that have passed.
const SEARCH: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(10));

/// Receiving end of the submission queue. Queries are searched in place, so that the queue capacity bounds what
/// waits.
pub(super) struct Submissions {
    pub receiver: QueueReceiver<Query>,
    /// Query ends in the queue, to be reported.
    ends: Vec<Notice>,
    /// Queries that ended in the queue, ever.
    ended: u64,
    /// Next search for deadlines.
    search_at: Time,
}

impl Submissions {
    pub fn new(receiver: QueueReceiver<Query>) -> Submissions {
        Submissions { receiver, ends: Vec::new(), ended: 0, search_at: Time(0) }
    }

    /// Takes the oldest query that has not ended.
    #[inline]
    pub fn take(&mut self) -> Option<Query> {
        loop {
            let query = self.receiver.take()?;
            if !query.has_ended {
                return Some(query);
            }
        }
    }

    /// Fails the queries whose deadline has passed. O(queries), at most once in a millisecond.
    pub fn expire(&mut self, now: Time) {
        if now < self.search_at {
            return;
        }
        let (mut next, mut leading, mut is_leading) = (now.after(SEARCH.1), 0, true);
        let before = self.ends.len();
        self.receiver.for_each(|query| {
            if !query.has_ended && query.deadline <= now {
                self.ends.push(end(query, Failure::NotSent));
            } else if !query.has_ended {
                next = next.min(query.deadline);
            }
            is_leading &= query.has_ended;
            leading += u32::from(is_leading);
        });
        self.ended += (self.ends.len() - before) as u64;
        self.search_at = next.max(now.after(SEARCH.0));
        // These places are free for others.
        (0..leading).for_each(|_| drop(self.receiver.take()));
    }

    /// Next search time, if there are queries to search.
    pub fn next_search(&self) -> Option<Time> {
        (!self.receiver.is_empty()).then_some(self.search_at)
    }

    /// Ends the oldest query with this token; false without one.
    pub fn cancel(&mut self, token: u64) -> bool {
        let mut ended = None;
        self.receiver.for_each(|query| {
            if ended.is_none() && query.token == token && !query.has_ended {
                ended = Some(end(query, Failure::Cancelled));
            }
        });
        self.ended += u64::from(ended.is_some());
        self.ends.extend(ended);
        ended.is_some()
    }

    /// Moves the ends to be reported to `notices`.
    pub fn take_ends(&mut self, notices: &mut Vec<Notice>) {
        notices.append(&mut self.ends);
    }

    /// Queries that ended in the queue, ever.
    pub fn ended(&self) -> u64 {
        self.ended
    }
}

/// Marks a query in the queue as ended. The memory is free at once.
fn end(query: &mut Query, failure: Failure) -> Notice {
    query.has_ended = true;
    let (token, outcome) = (query.token, Outcome::Failed(failure));
    Notice::Ended { query: QueryId::UNACCEPTED, token, outcome, quarantined: false }
}
