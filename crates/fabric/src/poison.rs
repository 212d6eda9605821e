//! Group poison flag: set once by the first fatal error, read by every wait.

use crate::lane_table::LaneTable;
use crate::peer_memory::ProbeWord;
use crate::types::Time;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use weft_control::{Cause, Poison, Rank};

/// Time that a wait continues for a peer that has left, whose last writes may be in flight.
const DEPARTURE_GRACE: Duration = Duration::from_secs(1);

/// Shared between an engine, waiting threads and the control plane.
pub struct PoisonFlag {
    set: AtomicBool,
    cause: OnceLock<Poison>,
    left: Box<[AtomicBool]>,
    any_left: AtomicBool,
    lanes: Arc<LaneTable>,
    callback: OnceLock<PoisonCallback>,
    /// Words by which peers read this process's memory.
    words: Vec<Arc<ProbeWord>>,
}

/// Callback for the first cause, if it arose in this process.
type PoisonCallback = Box<dyn Fn(&Poison) + Send + Sync>;

impl PoisonFlag {
    pub(crate) fn new(size: u32, lanes: Arc<LaneTable>, words: Vec<Arc<ProbeWord>>) -> PoisonFlag {
        let left = (0..size).map(|_| AtomicBool::new(false)).collect();
        PoisonFlag {
            set: AtomicBool::new(false),
            cause: OnceLock::new(),
            left,
            any_left: AtomicBool::new(false),
            lanes,
            callback: OnceLock::new(),
            words,
        }
    }

    /// Poisons the group and wakes all waits. The first cause wins and is passed to the
    /// [`PoisonFlag::on_poison`] callback.
    pub fn poison(&self, cause: Poison) {
        if self.mark(cause)
            && let (Some(callback), Some(cause)) = (self.callback.get(), self.cause.get())
        {
            callback(cause);
        }
    }

    /// [`PoisonFlag::poison`] for a cause received from the control plane; the callback is not called.
    pub fn poison_from_peer(&self, cause: Poison) {
        self.mark(cause);
    }

    /// Sets the callback for a cause that arises here; called at most once. Only the first call has an
    /// effect.
    pub fn on_poison(&self, callback: PoisonCallback) {
        let first = self.callback.set(callback).is_ok();
        debug_assert!(first, "one control plane for one engine");
    }

    fn mark(&self, cause: Poison) -> bool {
        let first = self.cause.set(cause).is_ok();
        // A call that fails gives memory back, which peers may no longer read then.
        self.words.iter().for_each(|word| word.revoke());
        self.set.store(true, Ordering::Release);
        self.lanes.notify();
        first
    }

    /// True if the group is poisoned.
    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.set.load(Ordering::Acquire)
    }

    /// The cause, if the group is poisoned.
    #[inline]
    pub fn get(&self) -> Option<&Poison> {
        if self.set.load(Ordering::Acquire) { self.cause.get() } else { None }
    }

    /// Records that a peer has left: earlier writes from it count, and no more follow.
    pub fn peer_left(&self, rank: Rank) {
        if let Some(left) = self.left.get(rank.0 as usize) {
            left.store(true, Ordering::Release);
            self.any_left.store(true, Ordering::Release);
            self.lanes.notify();
        }
    }

    /// True if any peer has left.
    pub fn any_has_left(&self) -> bool {
        self.any_left.load(Ordering::Acquire)
    }

    /// True if this peer has left.
    pub fn has_left(&self, rank: Rank) -> bool {
        self.left.get(rank.0 as usize).is_some_and(|left| left.load(Ordering::Acquire))
    }
}

/// Poison for a wait at `rank` that has needed a departed peer since `left_since`; `None` within the grace period.
pub(crate) fn departure(
    left_since: &mut Option<Time>,
    now: Time,
    what: &str,
    rank: Rank,
    departed: Rank,
) -> Option<Poison> {
    if now.since(*left_since.get_or_insert(now)) < DEPARTURE_GRACE {
        return None;
    }
    // Other ranks read it too.
    let detail =
        format!("{what} of {rank} was not complete; call barrier on all ranks before one leaves");
    Some(Poison { kind: Cause::Left, rank: Some(departed), detail })
}
