//! Process-wide unique numbers.

use std::sync::atomic::{AtomicU64, Ordering};

/// Process-wide unique number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UniqueId(pub(super) u64);

impl UniqueId {
    pub fn new() -> UniqueId {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        UniqueId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}
