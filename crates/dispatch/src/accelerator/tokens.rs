//! Tokens that backends append to unfinished answers, from any thread.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Query in a job: connection and slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JobQuery {
    pub(super) link: u64,
    pub(super) slot: u32,
}

/// Called when a batch has ended or has appended tokens, on the thread that runs it: wakes the node's thread.
pub type Waker = Box<dyn Fn() + Send + Sync>;

/// A query's tokens so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Appended {
    pub index: usize,
    pub query: JobQuery,
    /// Bytes.
    pub bytes: u64,
}

/// Tokens in transit from backends to the node.
#[derive(Default)]
pub(super) struct TokenQueue {
    appended: Mutex<Vec<Appended>>,
    /// False with an empty queue, so that a poll takes no lock then.
    any: AtomicBool,
    waker: OnceLock<Waker>,
}

impl TokenQueue {
    /// Calls `waker` after each push; the first call has an effect.
    pub fn wake_with(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    pub fn push(&self, appended: Appended) {
        self.appended.lock().unwrap_or_else(PoisonError::into_inner).push(appended);
        self.any.store(true, Ordering::Release);
        if let Some(waker) = self.waker.get() {
            waker();
        }
    }

    /// Swaps the queue with an empty list.
    #[inline]
    pub fn take(&self, into: &mut Vec<Appended>) {
        if self.any.load(Ordering::Acquire) {
            let mut appended = self.appended.lock().unwrap_or_else(PoisonError::into_inner);
            self.any.store(false, Ordering::Relaxed);
            std::mem::swap(&mut *appended, into);
        }
    }
}

impl fmt::Debug for TokenQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenQueue").field("any", &self.any).finish_non_exhaustive()
    }
}
