//! Python's callbacks for requests that have ended.
//!
//! The engine ends requests while a thread holds its lock without the GIL, and a callback may make the
//! next call. So callbacks are queued until a call has released the lock and taken the GIL; its thread
//! then runs them.

use crate::errors::raise;
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use weft_fabric::CompletionCallback;

/// Callbacks that are due, in the order in which their requests ended.
#[derive(Clone, Default)]
pub struct CallbackQueue {
    due: Arc<Mutex<DueCallbacks>>,
}

#[derive(Default)]
struct DueCallbacks {
    callbacks: VecDeque<(Py<PyAny>, Result<(), String>)>,
    /// True while a thread runs them: a callback that makes a call does not run the next one inside.
    running: bool,
}

/// True once the engine has accepted a request; a rejected one calls back never.
type Accepted = Arc<AtomicBool>;

/// A callback that was not called yet; dropped with its request.
struct PendingCallback {
    callable: Option<Py<PyAny>>,
    accepted: Accepted,
    callbacks: CallbackQueue,
}

impl PendingCallback {
    fn end(&mut self, outcome: Result<(), String>) {
        if let Some(callable) = self.callable.take() {
            self.callbacks.lock().callbacks.push_back((callable, outcome));
        }
    }
}

impl Drop for PendingCallback {
    fn drop(&mut self) {
        if !self.accepted.load(Ordering::Relaxed) {
            return;
        }
        self.end(Err("the communicator was closed before the request had ended".into()));
    }
}

impl CallbackQueue {
    fn lock(&self) -> MutexGuard<'_, DueCallbacks> {
        self.due.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The engine's callback for the end of a request, and the flag to set if the engine accepts the request.
    pub fn callback(&self, callable: Py<PyAny>) -> (CompletionCallback, Accepted) {
        let accepted = Accepted::default();
        let (callable, callbacks) = (Some(callable), self.clone());
        let mut pending = PendingCallback { callable, accepted: accepted.clone(), callbacks };
        (Box::new(move |outcome| pending.end(outcome)), accepted)
    }

    /// Runs the callbacks that are due, unless a caller of this one does. Exceptions of callbacks go to
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

    /// True if no callback is due.
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
