//! Python's callbacks for requests that have ended, and for watched counters.
//!
//! The engine ends requests while a thread holds its lock without the GIL, and a callback may make the
//! next call. So callbacks are queued until a call has released the lock and taken the GIL; its thread
//! then runs them. A call that waits runs them meanwhile, since they may cause what it waits for; so does a wait inside
//! a callback. Calls on other threads run them while a callback blocks.

use crate::errors::{Error, raise};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};
use weft_fabric::CompletionCallback;

/// Time after which a callback counts as one that blocks: other threads run the next ones.
const BLOCKED: Duration = Duration::from_millis(100);
/// Maximum depth for callbacks that run inside other callbacks' waits on one thread.
const MOST_NESTED: usize = 16;

/// Reason for a callback's error.
pub enum Failure {
    /// A write failed.
    Write(String),
    /// A watch ended with the error that a wait would raise.
    Watch(Error),
}

impl Failure {
    fn exception(self, py: Python<'_>) -> PyErr {
        match self {
            Failure::Write(why) => raise(py, "WriteFailedError", &why),
            Failure::Watch(error) => error.into(),
        }
    }
}

/// Due callbacks, in the order in which the requests and watches ended.
#[derive(Clone, Default)]
pub struct CallbackQueue {
    due: Arc<Mutex<DueCallbacks>>,
}

#[derive(Default)]
struct DueCallbacks {
    callbacks: VecDeque<(Py<PyAny>, Result<(), Failure>)>,
    /// Threads that run them, with each one's callback start: a callback that makes a call does not run the next
    /// one inside, unless the call waits.
    running: Vec<(ThreadId, Instant)>,
}

impl DueCallbacks {
    /// True if the calling thread may run the next callback; `waits`: in a wait.
    fn admits(&self, thread: ThreadId, waits: bool) -> bool {
        let own = self.running.iter().filter(|(running, _)| *running == thread).count();
        let is_blocked = |since: &Instant| since.elapsed() >= BLOCKED;
        match own {
            0 => self.running.iter().all(|(_, since)| is_blocked(since)),
            _ => waits && own < MOST_NESTED,
        }
    }
}

/// True once the engine has accepted a request; a rejected one calls back never.
pub type Accepted = Arc<AtomicBool>;

/// A callback that was not called yet; dropped with the request or the watch.
pub struct PendingCallback {
    callable: Option<Py<PyAny>>,
    /// The outcome if the engine drops it.
    closed: Option<Failure>,
    accepted: Accepted,
    callbacks: CallbackQueue,
}

impl PendingCallback {
    pub fn end(&mut self, outcome: Result<(), Failure>) {
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
        if let Some(closed) = self.closed.take() {
            self.end(Err(closed));
        }
    }
}

impl CallbackQueue {
    fn lock(&self) -> MutexGuard<'_, DueCallbacks> {
        self.due.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The engine's callback for a request's end, and the flag to set if the engine accepts the request.
    pub fn callback(&self, callable: Py<PyAny>) -> (CompletionCallback, Accepted) {
        let closed = "the communicator was closed before the request had ended".into();
        let (mut pending, accepted) = self.pending(callable, Failure::Write(closed));
        (Box::new(move |outcome| pending.end(outcome.map_err(Failure::Write))), accepted)
    }

    /// A callback to put into the queue, and the flag to set if the engine accepts it; `closed`: the outcome if the
    /// engine drops it.
    pub fn pending(&self, callable: Py<PyAny>, closed: Failure) -> (PendingCallback, Accepted) {
        let accepted = Accepted::default();
        let (callable, callbacks, closed) = (Some(callable), self.clone(), Some(closed));
        let pending = PendingCallback { callable, closed, accepted: accepted.clone(), callbacks };
        (pending, accepted)
    }

    /// Runs the callbacks that are due, unless a caller up the stack does. Callback exceptions go to
    /// `sys.unraisablehook`.
    pub fn run(&self, py: Python<'_>) {
        self.run_admitted(py, false);
    }

    /// Same as [`CallbackQueue::run`], in a wait, possibly inside a callback.
    pub fn run_in_wait(&self, py: Python<'_>) {
        self.run_admitted(py, true);
    }

    fn run_admitted(&self, py: Python<'_>, waits: bool) {
        let thread = thread::current().id();
        while let Some((callable, outcome)) = self.begin(thread, waits) {
            let error = outcome.err().map(|failure| failure.exception(py).into_value(py));
            if let Err(raised) = callable.call1(py, (error,)) {
                raised.write_unraisable(py, Some(callable.bind(py)));
            }
            self.end(thread);
        }
    }

    fn begin(&self, thread: ThreadId, waits: bool) -> Option<(Py<PyAny>, Result<(), Failure>)> {
        let mut due = self.lock();
        if due.callbacks.is_empty() || !due.admits(thread, waits) {
            return None;
        }
        due.running.push((thread, Instant::now()));
        due.callbacks.pop_front()
    }

    fn end(&self, thread: ThreadId) {
        let running = &mut self.lock().running;
        // The thread's innermost callback.
        if let Some(last) = running.iter().rposition(|(each, _)| *each == thread) {
            running.remove(last);
        }
    }

    /// True if no callback is due.
    pub fn is_empty(&self) -> bool {
        self.lock().callbacks.is_empty()
    }
}
