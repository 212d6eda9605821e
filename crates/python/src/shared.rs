//! The communicator as all that was made on it shares it.
//!
//! Every call that can wait gives up the GIL first and takes the communicator's lock then, never the
//! other way round; while it waits it looks several times a second whether a signal has come.

use crate::errors::Error;
use crate::finished::Finished;
use crate::fork;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use weft_fabric::{Communicator as Fabric, Time, Waiter, clock};

/// What a signal handler raised while the control plane waited.
pub type Raised = Arc<Mutex<Option<PyErr>>>;

/// The communicator, shared by all that was made on it; `None` once closed.
#[derive(Clone)]
pub struct Shared {
    fabric: Arc<Mutex<Option<Fabric>>>,
    pub raised: Raised,
    pub finished: Finished,
}

impl Shared {
    pub fn new(fabric: Fabric, raised: Raised) -> Shared {
        let fabric = Arc::new(Mutex::new(Some(fabric)));
        Shared { fabric, raised, finished: Finished::default() }
    }

    /// Runs `work` without the GIL and with the communicator. If a signal ended it, what the signal's
    /// handler raised takes the place of its error.
    pub fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Fabric) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        fork::check(py)?;
        let result = py.detach(|| {
            let mut guard = self.lock();
            let fabric = guard.as_mut().ok_or(weft_control::Error::Closed)?;
            work(fabric)
        });
        self.finished.run(py);
        result.map_err(|error| take(&self.raised).unwrap_or_else(|| error.into()))
    }

    /// Runs `work`, which may wait until `timeout` seconds from now, as [`Shared::with`] does. A signal
    /// ends it, and its handler's exception takes the place of the error.
    pub fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: f64,
        work: impl FnOnce(&mut Fabric, &mut Waiter<'_>) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        self.with(py, |fabric| {
            let mut raised = None;
            let mut interrupted = || {
                raised = Python::attach(|py| py.check_signals().err());
                raised.is_some()
            };
            let mut waiter = fabric.waiter(deadline(timeout), &mut interrupted);
            let result = work(fabric, &mut waiter);
            result.map_err(|error| raised.map_or(error, Error::Python))
        })
    }

    /// Takes the communicator away from everybody; `None` if it was closed before.
    pub fn close(&self) -> Option<Fabric> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Fabric>> {
        self.fabric.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// What was raised, if anything.
pub fn take(raised: &Raised) -> Option<PyErr> {
    raised.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
}

/// The instant `timeout` seconds from now.
pub fn deadline(timeout: f64) -> Time {
    let timeout = Duration::try_from_secs_f64(timeout.max(0.0)).unwrap_or(Duration::MAX);
    clock::now().after(timeout)
}
