//! Memory identity, and callbacks before a memory is dropped.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Identifies a [`Memory`](super::Memory): unique in this process and never reused, unlike the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryId(u64);

impl MemoryId {
    /// A fresh id.
    pub(super) fn next() -> MemoryId {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        MemoryId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Callback when a memory is dropped, while bytes and owner are still valid.
pub trait MemoryWatcher: Send + Sync {
    /// The memory with this id is being dropped, on this thread.
    fn memory_dropped(&self, memory: MemoryId);
}

/// A memory's watchers.
#[derive(Default)]
pub(super) struct Watchers(Mutex<Vec<Weak<dyn MemoryWatcher>>>);

impl Watchers {
    /// Adds a watcher, once.
    pub fn add(&self, watcher: &Arc<impl MemoryWatcher + 'static>) {
        let mut watchers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |known: &Weak<dyn MemoryWatcher>| {
            known.as_ptr().cast::<()>() == Arc::as_ptr(watcher).cast::<()>()
        };
        // A weak reference reserves the address, so equal addresses belong to one watcher.
        if watchers.iter().any(same) {
            return;
        }
        watchers.retain(|known| known.strong_count() > 0);
        let watcher: Arc<dyn MemoryWatcher> = watcher.clone();
        watchers.push(Arc::downgrade(&watcher));
    }

    /// Calls all watchers, once.
    pub fn end(&mut self, memory: MemoryId) {
        let watchers = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        for watcher in watchers.drain(..).filter_map(|watcher| watcher.upgrade()) {
            watcher.memory_dropped(memory);
        }
    }
}

impl fmt::Debug for Watchers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watchers").finish_non_exhaustive()
    }
}
