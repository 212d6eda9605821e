//! A process that forks after `weft.init()` has a copy of the handles and of none of the threads, and
//! shares the memory and the connections with its parent: every call in the child is refused. Closing and
//! garbage collection there only forget, and take no lock: a thread of the parent may have held it.

use crate::errors::raise;
use pyo3::prelude::*;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static FORKED: AtomicBool = AtomicBool::new(false);
static WATCH: Once = Once::new();

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// From now on, children of this process are refused.
pub fn watch() {
    WATCH.call_once(|| {
        // SAFETY: the handler is async-signal-safe (one store) and lives as long as the library,
        // which Python never unloads.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// An error in a process that was forked after the library was used.
pub fn check(py: Python<'_>) -> PyResult<()> {
    if !FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(raise(
        py,
        "ForkError",
        "this process was forked after weft.init(): its connections belong to the parent. Start \
         workers with the spawn or forkserver method, or call weft.init() after the fork in a \
         process that has not called it before",
    ))
}

/// Whether this process was forked after the library was used.
pub fn is_child() -> bool {
    FORKED.load(Ordering::Relaxed)
}
