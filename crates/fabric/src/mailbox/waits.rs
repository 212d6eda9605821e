//! Announces waits that may sleep.

use super::table::AreaTable;
use crate::atomics::Word64;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A rank's waits that need the doorbell for messages.
///
/// A thread announces a wait, then looks for messages, then sleeps in an engine wait. A peer stores a
/// message, then reads the announcement. Each puts a fence between the two, so that the thread finds the
/// message or the peer rings the doorbell.
#[derive(Debug)]
pub struct MailboxWaits {
    own: AreaTable,
    /// Waits that all threads have announced.
    count: Mutex<u32>,
}

impl MailboxWaits {
    pub(super) fn new(own: AreaTable) -> MailboxWaits {
        MailboxWaits { own, count: Mutex::new(0) }
    }

    /// Announces a wait until the result is dropped.
    pub fn announce(self: &Arc<Self>) -> MailboxWait {
        let mut count = self.count();
        *count += 1;
        self.own.set_wait(true);
        AtomicU64::fence();
        drop(count);
        MailboxWait(self.clone())
    }

    fn count(&self) -> MutexGuard<'_, u32> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Announced wait.
#[derive(Debug)]
pub struct MailboxWait(Arc<MailboxWaits>);

impl Drop for MailboxWait {
    fn drop(&mut self) {
        let mut count = self.0.count();
        *count -= 1;
        if *count == 0 {
            self.0.own.set_wait(false);
        }
    }
}
