//! Waiting threads of one engine: one leads, the others follow.
//!
//! The leader sleeps on what peers raise (the bell or descriptors) and makes progress for all. Followers
//! sleep on a sequence number, which rises with everything that may end a wait. A thread that stops
//! waiting wakes one follower, which leads from then on. The engine's lock is held by none of them
//! while they sleep.
//!
//! Every read that decides about a wake-up is a read-modify-write: of two of them one sees the other.

use crate::atomics::{Line, Word32};
use crate::clock;
use crate::types::Time;

/// Bit of the state word: a thread sleeps as the leader, or is about to. Below it is the number of
/// followers.
const LEADS: u32 = 1 << 31;

/// The waiting threads of one engine.
pub struct Waiters<W> {
    /// Rises with everything that may end a wait.
    sequence: Line<W>,
    /// [`LEADS`] and the number of followers.
    state: Line<W>,
    /// Threads inside a wait, asleep or not.
    waiting: W,
}

/// Sleep of a leader. `prepare` and `finish` take the engine's lock.
pub trait Bed {
    /// A sleep that was announced to peers.
    type Park;

    /// Announces the sleep; `None` if there is something to do already.
    fn prepare(&self) -> Option<Self::Park>;

    /// Sleeps until a peer raises, the leader is nudged, or `until`.
    fn sleep(&self, park: &Self::Park, until: Time);

    /// Withdraws the announcement.
    fn finish(&self, park: Self::Park);
}

impl<W: Word32> Default for Waiters<W> {
    fn default() -> Waiters<W> {
        Waiters { sequence: Line(W::new(0)), state: Line(W::new(0)), waiting: W::new(0) }
    }
}

impl<W: Word32> Waiters<W> {
    /// A thread begins to wait.
    pub fn enter(&self) {
        self.waiting.fetch_add(1);
    }

    /// A thread waits no more.
    pub fn exit(&self) {
        self.waiting.fetch_add(u32::MAX);
        self.step_aside();
    }

    /// Whether more threads wait than these. A thread that enters after the caller has given the
    /// engine's lock back finds in the engine what the caller found.
    pub fn are_more_than(&self, own: u32) -> bool {
        self.waiting.load() > own
    }

    /// Identifies what has been notified so far, for [`Waiters::park`]. Draw it before the poll that
    /// finds nothing.
    pub fn ticket(&self) -> u32 {
        self.sequence.0.load()
    }

    /// Makes every waiting thread look again. Returns whether the leader's bell must be nudged.
    #[must_use]
    pub fn notify(&self) -> bool {
        self.sequence.0.fetch_add(1);
        let state = self.state.0.fetch_or(0);
        if state & !LEADS > 0 {
            self.sequence.0.wake();
        }
        state & LEADS != 0
    }

    /// The caller goes on to something else than a poll: lets a follower lead meanwhile.
    pub fn step_aside(&self) {
        let state = self.state.0.fetch_or(0);
        if state & LEADS == 0 && state > 0 {
            // A follower on its way to sleep finds its ticket old, and looks who leads.
            self.sequence.0.fetch_add(1);
            self.sequence.0.wake_one();
        }
    }

    /// Sleeps, as the leader or as a follower, until something may have happened since `ticket`, at most
    /// until `until`.
    pub fn park(&self, ticket: u32, until: Time, bed: &impl Bed) {
        // Counted as a follower first: a leader that leaves from here on wakes it.
        let before = self.state.0.fetch_add(1);
        if before & LEADS == 0 && self.state.0.fetch_or(LEADS) & LEADS == 0 {
            self.state.0.fetch_add(u32::MAX);
            let _leader = Leader(self);
            self.lead(ticket, until, bed);
        } else {
            self.sequence.0.wait(ticket, until.since(clock::now()));
            self.state.0.fetch_add(u32::MAX);
        }
    }

    fn lead(&self, ticket: u32, until: Time, bed: &impl Bed) {
        let Some(park) = bed.prepare() else { return };
        // What was notified since the ticket was drawn either shows here or nudges the bell, where a
        // nudge stays until this thread has withdrawn its announcement.
        if self.sequence.0.fetch_or(0) == ticket {
            bed.sleep(&park, until);
        }
        bed.finish(park);
    }
}

/// Ends the lead, also when a panic does.
struct Leader<'a, W: Word32>(&'a Waiters<W>);

impl<W: Word32> Drop for Leader<'_, W> {
    fn drop(&mut self) {
        self.0.state.0.fetch_and(!LEADS);
    }
}
