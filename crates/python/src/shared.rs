//! Communicator shared by all objects made on it.
//!
//! Every call that can wait releases the GIL first. No call waits for another thread's wait, so a signal handler
//! may make any call while its thread waits; a waiting thread checks for signals several times a second.

use crate::callbacks::CallbackQueue;
use crate::device::Domains;
use crate::errors::Error;
use crate::fork::{self, ProcessOwned};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use weft_fabric::{Communicator as Fabric, Time, WaitOptions, clock};

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

    /// Runs `work` without the GIL and with the communicator. If a signal ended it, the exception of the
    /// signal's handler takes the place of its error.
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
    /// ends it, and its handler's exception takes the place of the error.
    pub fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: f64,
        work: impl FnOnce(&Fabric, &mut WaitOptions<'_>) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        self.with(py, |fabric| {
            let mut raised = None;
            let mut interrupted = || {
                raised = Python::attach(|py| py.check_signals().err());
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

/// Seconds as a duration: zero for negative numbers, the longest duration for those beyond it.
pub fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

/// The instant `timeout` seconds from now.
pub fn deadline(timeout: f64) -> Time {
    clock::now().after(duration(timeout))
}
