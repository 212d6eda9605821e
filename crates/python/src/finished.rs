//! Python's callbacks for requests that have ended.
//!
//! The engine ends requests while a thread holds its lock and not the GIL, and a callback may make the
//! next call. So callbacks wait here until a call has given the lock back and taken the GIL; then its
//! thread runs them.

use crate::errors::raise;
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use weft_fabric::request::Callback;

/// Callbacks that are due, in the order in which their requests ended.
#[derive(Clone, Default)]
pub struct Finished {
    due: Arc<Mutex<Due>>,
}

#[derive(Default)]
struct Due {
    callbacks: VecDeque<(Py<PyAny>, Result<(), String>)>,
    /// Whether a thread is running them; a callback that makes a call does not run the next inside.
    running: bool,
}

/// Whether the engine has taken a request. One that it refuses has no end.
type Accepted = Arc<AtomicBool>;

/// A callback that was not called yet. If it goes, so does its request.
struct Pending {
    callable: Option<Py<PyAny>>,
    accepted: Accepted,
    finished: Finished,
}

impl Pending {
    fn end(&mut self, outcome: Result<(), String>) {
        if let Some(callable) = self.callable.take() {
            self.finished.lock().callbacks.push_back((callable, outcome));
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.accepted.load(Ordering::Relaxed) {
            return;
        }
        self.end(Err("the communicator was closed before the request had ended".into()));
    }
}

impl Finished {
    fn lock(&self) -> MutexGuard<'_, Due> {
        self.due.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What the engine calls when the request ends, and the mark to set if it takes the request.
    pub fn callback(&self, callable: Py<PyAny>) -> (Callback, Accepted) {
        let accepted = Accepted::default();
        let (callable, finished) = (Some(callable), self.clone());
        let mut pending = Pending { callable, accepted: accepted.clone(), finished };
        (Box::new(move |outcome| pending.end(outcome)), accepted)
    }

    /// Runs what is due, unless a caller of this one does. What a callback raises goes to
    /// `sys.unraisablehook`.
    pub fn run(&self, py: Python<'_>) {
        if std::mem::replace(&mut self.lock().running, true) {
            return;
        }
        while let Some((callable, outcome)) = self.next() {
            let error = outcome.err().map(|why| raise(py, "WriteFailedError", &why));
            let error = error.map(|error| error.into_value(py));
            if let Err(raised) = callable.call1(py, (error,)) {
                raised.write_unraisable(py, Some(callable.bind(py)));
            }
        }
    }

    /// Whether no callback is due.
    pub fn is_empty(&self) -> bool {
        self.lock().callbacks.is_empty()
    }

    fn next(&self) -> Option<(Py<PyAny>, Result<(), String>)> {
        let mut due = self.lock();
        let next = due.callbacks.pop_front();
        due.running = next.is_some();
        next
    }
}
