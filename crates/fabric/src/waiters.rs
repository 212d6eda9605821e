//! An engine's waiting threads: a leader and followers.
//!
//! The leader sleeps on the doorbell or on descriptors and makes progress for all. Followers sleep on a
//! sequence number, incremented by each event that may end a wait. A thread that stops waiting wakes one
//! follower to lead. Sleeping threads do not hold the engine's lock.
//!
//! Every read that decides about a wake-up is a read-modify-write, so one of two such operations sees the
//! other.

use crate::atomics::{CacheLine, Word32};
use crate::clock;
use crate::types::Time;

/// State word bit: a thread sleeps as the leader, or is about to. The lower bits count followers.
const LEADS: u32 = 1 << 31;

/// An engine's waiting threads.
pub struct Waiters<W> {
    /// Incremented by each event that may end a wait.
    sequence: CacheLine<W>,
    /// [`LEADS`] and the follower count.
    state: CacheLine<W>,
    /// Threads inside a wait, asleep or not.
    waiting: W,
}

/// A leader's sleep. `prepare` and `finish` take the engine's lock.
pub trait LeaderSleep {
    /// An announced sleep.
    type Announced;

    /// Announces the sleep; `None` if the engine has work.
    fn prepare(&self) -> Option<Self::Announced>;

    /// Sleeps until a raise, a notification or `until`.
    fn sleep(&self, park: &Self::Announced, until: Time);

    /// Withdraws the announcement.
    fn finish(&self, park: Self::Announced);
}

impl<W: Word32> Default for Waiters<W> {
    fn default() -> Waiters<W> {
        Waiters { sequence: CacheLine(W::new(0)), state: CacheLine(W::new(0)), waiting: W::new(0) }
    }
}

impl<W: Word32> Waiters<W> {
    /// Registers a waiting thread.
    pub fn enter(&self) {
        self.waiting.fetch_add(1);
    }

    /// Removes a waiting thread, and passes on the lead.
    pub fn exit(&self) {
        self.waiting.fetch_add(u32::MAX);
        self.yield_lead();
    }

    /// True if more than `own` threads wait. A thread that enters after the caller has released the
    /// engine's lock finds the caller's events in the engine.
    pub fn are_more_than(&self, own: u32) -> bool {
        self.waiting.load() > own
    }

    /// Notifications so far, for [`Waiters::park`]. Read it before the poll that finds no event.
    pub fn ticket(&self) -> u32 {
        self.sequence.0.load()
    }

    /// Makes every waiting thread poll again. Returns true if the leader's doorbell must be notified.
    #[must_use]
    pub fn notify(&self) -> bool {
        self.sequence.0.fetch_add(1);
        let state = self.state.0.fetch_or(0);
        if state & !LEADS > 0 {
            self.sequence.0.wake();
        }
        state & LEADS != 0
    }

    /// Lets a follower lead, before the caller does something other than a poll.
    pub fn yield_lead(&self) {
        let state = self.state.0.fetch_or(0);
        if state & LEADS == 0 && state > 0 {
            // A follower about to sleep finds an outdated ticket and tries to lead.
            self.sequence.0.fetch_add(1);
            self.sequence.0.wake_one();
        }
    }

    /// Sleeps as the leader or as a follower until an event after `ticket`, at most until `until`.
    pub fn park(&self, ticket: u32, until: Time, sleep: &impl LeaderSleep) {
        // Counted as a follower first: a leader that leaves from here on wakes it.
        let before = self.state.0.fetch_add(1);
        if before & LEADS == 0 && self.state.0.fetch_or(LEADS) & LEADS == 0 {
            self.state.0.fetch_add(u32::MAX);
            let _leader = Leader(self);
            self.lead(ticket, until, sleep);
        } else {
            self.sequence.0.wait(ticket, until.since(clock::now()));
            self.state.0.fetch_add(u32::MAX);
        }
    }

    fn lead(&self, ticket: u32, until: Time, sleep: &impl LeaderSleep) {
        let Some(park) = sleep.prepare() else { return };
        // A notification since the ticket either shows here or sets the doorbell, where it stays until
        // this thread has withdrawn the announcement.
        if self.sequence.0.fetch_or(0) == ticket {
            sleep.sleep(&park, until);
        }
        sleep.finish(park);
    }
}

/// Guard that holds the lead; ends it on drop, also by a panic.
struct Leader<'a, W: Word32>(&'a Waiters<W>);

impl<W: Word32> Drop for Leader<'_, W> {
    fn drop(&mut self) {
        self.0.state.0.fetch_and(!LEADS);
    }
}
