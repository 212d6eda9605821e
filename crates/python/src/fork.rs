//! Fork detection. A child forked after `weft.init()` has copies of the handles, no threads, and shares
//! memory and connections with the parent: every call there is rejected. Close and garbage collection have no
//! effect there and take no lock, which a parent thread may have held.

use crate::errors::raise;
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static FORKED: AtomicBool = AtomicBool::new(false);
static WATCH: Once = Once::new();

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Installs the fork handler: calls in children forked from now on are rejected.
pub fn watch() {
    WATCH.call_once(|| {
        // SAFETY: the handler is async-signal-safe (one store) and lives as long as the library,
        // which Python never unloads.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// `ForkError` in a process that was forked after the library was used.
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

/// True if this process was forked after the library was used.
pub fn is_child() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// A value that a forked child does not drop: the threads, connections, devices and mappings belong to
/// the parent.
#[derive(Debug)]
pub struct ProcessOwned<T>(ManuallyDrop<T>);

impl<T> ProcessOwned<T> {
    pub fn new(value: T) -> ProcessOwned<T> {
        ProcessOwned(ManuallyDrop::new(value))
    }
}

impl<T> Deref for ProcessOwned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for ProcessOwned<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T> Drop for ProcessOwned<T> {
    fn drop(&mut self) {
        if !is_child() {
            // SAFETY: it is dropped only here, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}
