//! World: the network between the ranks, for tests and simulations.

use super::config::WorldConfig;
use super::state::{SimEvent, State};
use super::violations::Violation;
use crate::types::Time;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weft_control::Rank;

/// Network between the ranks. Clones are handles on one world.
#[derive(Clone)]
pub struct World {
    pub(super) state: Arc<Mutex<State>>,
}

impl World {
    /// World at time zero.
    pub fn new(config: WorldConfig) -> World {
        World { state: Arc::new(Mutex::new(State::new(config))) }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// World size, dead ranks included.
    pub fn ranks(&self) -> u32 {
        self.state().size()
    }

    /// World seed.
    pub fn seed(&self) -> u64 {
        self.state().seed()
    }

    /// Current virtual time.
    pub fn now(&self) -> Time {
        self.state().now()
    }

    /// Advances to the next event and executes it; `false` with an empty calendar.
    pub fn step(&self) -> bool {
        self.state().step()
    }

    /// Schedules a stop in [`World::step`] at a rank's deadline.
    pub fn wake_at(&self, time: Time) {
        self.state().schedule(time, SimEvent::Wake);
    }

    /// Kills a rank: some parts in flight from it arrive, and peers notice after
    /// [`super::Faults::detection`].
    pub fn kill(&self, rank: Rank) {
        self.state().kill(rank);
    }

    /// Pauses a rank and the network to it until as many [`World::resume`]s.
    pub fn stop(&self, rank: Rank) {
        self.state().stop(rank);
    }

    /// Ends one pause.
    pub fn resume(&self, rank: Rank) {
        self.state().resume(rank);
    }

    /// Breaks the link between two ranks permanently.
    pub fn cut(&self, a: Rank, b: Rank) {
        self.state().cut(a, b);
    }

    /// True until the rank dies.
    pub fn is_alive(&self, rank: Rank) -> bool {
        self.state().is_alive(rank)
    }

    /// True if a rank is neither dead nor paused, and may be polled.
    pub fn is_running(&self, rank: Rank) -> bool {
        self.state().is_running(rank)
    }

    /// Recorded violations, in order.
    pub fn violations(&self) -> Vec<Violation> {
        self.state().violations().to_vec()
    }

    /// Hash over all events so far. Equal seeds and equal programs give equal hashes.
    pub fn log_hash(&self) -> u64 {
        self.state().log_hash()
    }
}
