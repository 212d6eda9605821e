//! The communicator as all that was made on it shares it.
//!
//! Every call that can wait gives up the GIL first. No call waits for another thread's wait, so a signal
//! handler may call anything while its thread waits; a waiting thread looks several times a second
//! whether a signal has come.

use crate::device::Domains;
use crate::errors::Error;
use crate::finished::Finished;
use crate::fork;
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use weft_fabric::{Communicator as Fabric, Time, Waiter, clock};

/// An exception that a signal handler raised while the control plane waited.
pub type Raised = Arc<Mutex<Option<PyErr>>>;

/// A communicator that is dropped in the process that made it alone: a forked child has neither its
/// threads nor a right to its connections.
struct Owned(ManuallyDrop<Fabric>);

impl Deref for Owned {
    type Target = Fabric;

    fn deref(&self) -> &Fabric {
        &self.0
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if !fork::is_child() {
            // SAFETY: it is dropped here alone, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}

/// The communicator, shared by all that was made on it; `None` once closed.
#[derive(Clone)]
pub struct Shared {
    fabric: Arc<Mutex<Option<Arc<Owned>>>>,
    pub raised: Raised,
    pub finished: Finished,
    pub domains: Domains,
}

impl Shared {
    pub fn new(fabric: Fabric, raised: Raised) -> Shared {
        let fabric = Arc::new(Owned(ManuallyDrop::new(fabric)));
        let fabric = Arc::new(Mutex::new(Some(fabric)));
        Shared { fabric, raised, finished: Finished::default(), domains: Domains::default() }
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
        self.finished.run(py);
        result.map_err(|error| take(&self.raised).unwrap_or_else(|| error.into()))
    }

    /// Runs `work`, which may wait until `timeout` seconds from now, as [`Shared::with`] does. A signal
    /// ends it, and its handler's exception takes the place of the error.
    pub fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: f64,
        work: impl FnOnce(&Fabric, &mut Waiter<'_>) -> Result<T, Error> + Send,
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

    /// Takes the communicator away from all users, ends their waits and leaves the group. The last thread that
    /// is inside a call drops it.
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

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Owned>>> {
        self.fabric.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// What was raised, if anything.
pub fn take(raised: &Raised) -> Option<PyErr> {
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
