//! Communicator shared by all objects made on it.
//!
//! Every call that can wait releases the GIL first. No call waits for another thread's wait, so a signal handler
//! may make any call while that thread waits; a waiting thread checks for signals several times a second.

use crate::callbacks::{CallbackQueue, Failure};
use crate::device::Domains;
use crate::errors::Error;
use crate::fork::{self, ProcessOwned};
use pyo3::prelude::*;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use weft_fabric::{
    Communicator as Fabric, CompletionCallback, Error as FabricError, RequestId, Time, WaitOptions,
    WatchCondition, clock,
};

/// An exception that a signal handler raised while the control plane waited.
pub type HandlerException = Arc<Mutex<Option<PyErr>>>;

/// The communicator, shared by all objects made on it; `None` once closed.
#[derive(Clone)]
pub struct Shared {
    fabric: Arc<Mutex<Option<Arc<ProcessOwned<Fabric>>>>>,
    pub raised: HandlerException,
    pub callbacks: CallbackQueue,
    pub domains: Domains,
}

impl Shared {
    pub fn new(fabric: Fabric, raised: HandlerException) -> Shared {
        let fabric = Arc::new(ProcessOwned::new(fabric));
        let fabric = Arc::new(Mutex::new(Some(fabric)));
        Shared { fabric, raised, callbacks: CallbackQueue::default(), domains: Domains::default() }
    }

    /// Runs `work` without the GIL and with the communicator. If a signal ended it, the
    /// signal handler's exception takes the place of the error.
    pub fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Fabric) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        fork::check(py)?;
        let result = py.detach(|| {
            let fabric = self.lock().clone().ok_or(weft_control::Error::Closed)?;
            work(&fabric)
        });
        self.callbacks.run(py);
        result.map_err(|error| take(&self.raised).unwrap_or_else(|| error.into()))
    }

    /// Runs `work`, which may wait until `timeout` seconds from now, as [`Shared::with`] does. A signal
    /// ends it, and the handler's exception takes the place of the error.
    pub fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: f64,
        work: impl FnOnce(&Fabric, &mut WaitOptions<'_>) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        self.with(py, |fabric| {
            let mut raised = None;
            let mut interrupted = || {
                raised = Python::attach(|py| {
                    // They may cause what this call waits for.
                    self.callbacks.run_in_wait(py);
                    py.check_signals().err()
                });
                raised.is_some()
            };
            let mut waiter = fabric.wait_options(deadline(timeout), &mut interrupted);
            let result = work(fabric, &mut waiter);
            result.map_err(|error| raised.map_or(error, Error::Python))
        })
    }

    /// The communicator; `None` once closed.
    pub fn get(&self) -> Option<Arc<ProcessOwned<Fabric>>> {
        self.lock().clone()
    }

    /// Ends all waits, now and later, with [`weft_control::Error::Closed`].
    pub fn end_waits(&self) {
        if fork::is_child() {
            return;
        }
        let fabric = self.lock().clone();
        if let Some(fabric) = fabric {
            fabric.close();
        }
    }

    /// Takes the communicator out, ends all waits and leaves the group. The last thread inside a call drops it.
    pub fn close(&self) {
        if fork::is_child() {
            return;
        }
        let taken = self.lock().take();
        self.domains.clear();
        if let Some(fabric) = taken {
            fabric.close();
            fabric.engine().end_watches();
            fabric.leave();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<ProcessOwned<Fabric>>>> {
        self.fabric.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The exception that a signal handler raised, if any.
pub fn take(raised: &HandlerException) -> Option<PyErr> {
    raised.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
}

/// Seconds as a duration: zero for negative numbers, the longest duration for numbers beyond it.
pub fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

/// The instant `timeout` seconds from now.
pub fn deadline(timeout: f64) -> Time {
    clock::now().after(duration(timeout))
}

/// Submits a request whose end calls `done`.
pub fn deliver(
    shared: &Shared,
    done: Option<Py<PyAny>>,
    submit: impl FnOnce(Option<CompletionCallback>) -> Result<RequestId, FabricError>,
) -> Result<RequestId, Error> {
    let (done, accepted) = done.map(|done| shared.callbacks.callback(done)).unzip();
    let id = submit(done)?;
    if let Some(accepted) = accepted {
        accepted.store(true, Ordering::Relaxed);
    }
    Ok(id)
}

/// Starts a watch that calls `callable` when it ends, as [`deliver`] does.
pub fn call_at_end(
    shared: &Shared,
    py: Python<'_>,
    callable: Py<PyAny>,
    condition: WatchCondition,
) -> PyResult<()> {
    shared.with(py, move |fabric| {
        let closed = Failure::Watch(weft_control::Error::Closed.into());
        let (mut pending, accepted) = shared.callbacks.pending(callable, closed);
        let end = move |outcome: Result<(), FabricError>| {
            pending.end(outcome.map_err(|error| Failure::Watch(error.into())));
        };
        let mut engine = fabric.engine();
        engine.watch(condition, Box::new(end))?;
        accepted.store(true, Ordering::Relaxed);
        Ok(())
    })
}
