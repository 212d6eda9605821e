//! The mark of a dead group: set once, by whoever notices first, seen by every wait.

use crate::lane_table::LaneTable;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use weft_control::{Poison, Rank};

/// Shared between an engine, its waiters and the control plane.
pub struct PoisonFlag {
    set: AtomicBool,
    cause: OnceLock<Poison>,
    left: Box<[AtomicBool]>,
    any_left: AtomicBool,
    lanes: Arc<LaneTable>,
    tell: OnceLock<Tell>,
}

/// Told of the first cause, if it arose here.
type Tell = Box<dyn Fn(&Poison) + Send + Sync>;

impl PoisonFlag {
    pub(crate) fn new(size: u32, lanes: Arc<LaneTable>) -> PoisonFlag {
        let left = (0..size).map(|_| AtomicBool::new(false)).collect();
        PoisonFlag {
            set: AtomicBool::new(false),
            cause: OnceLock::new(),
            left,
            any_left: AtomicBool::new(false),
            lanes,
            tell: OnceLock::new(),
        }
    }

    /// Poisons the group and wakes whoever waits; the first cause wins, and is told to whoever
    /// asked with [`PoisonFlag::on_poison`].
    pub fn poison(&self, cause: Poison) {
        if self.mark(cause)
            && let (Some(tell), Some(cause)) = (self.tell.get(), self.cause.get())
        {
            tell(cause);
        }
    }

    /// As [`PoisonFlag::poison`], for a cause that the others know already.
    pub fn told(&self, cause: Poison) {
        self.mark(cause);
    }

    /// Calls `tell`, once, when a cause arises here. Only the first caller is heard.
    pub fn on_poison(&self, tell: Tell) {
        let first = self.tell.set(tell).is_ok();
        debug_assert!(first, "one control plane for one engine");
    }

    fn mark(&self, cause: Poison) -> bool {
        let first = self.cause.set(cause).is_ok();
        self.set.store(true, Ordering::Release);
        self.lanes.nudge();
        first
    }

    /// Whether the group is poisoned.
    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.set.load(Ordering::Acquire)
    }

    /// The cause, if the group is poisoned.
    #[inline]
    pub fn get(&self) -> Option<&Poison> {
        if self.set.load(Ordering::Acquire) { self.cause.get() } else { None }
    }

    /// A peer has said goodbye: what it wrote still counts, more will not come.
    pub fn peer_left(&self, rank: Rank) {
        if let Some(left) = self.left.get(rank.0 as usize) {
            left.store(true, Ordering::Release);
            self.any_left.store(true, Ordering::Release);
            self.lanes.nudge();
        }
    }

    /// Whether some peer has left.
    pub fn any_has_left(&self) -> bool {
        self.any_left.load(Ordering::Acquire)
    }

    /// Whether a peer has left.
    pub fn has_left(&self, rank: Rank) -> bool {
        self.left.get(rank.0 as usize).is_some_and(|left| left.load(Ordering::Acquire))
    }
}
