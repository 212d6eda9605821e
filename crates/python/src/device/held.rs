//! Device operator, held until it is closed, and closed without the GIL.

use crate::errors::Error;
use crate::fork;
use crate::shared::Shared;
use pyo3::prelude::*;
use std::sync::{PoisonError, RwLock, TryLockError};
use weft_fabric::{Communicator as Fabric, Time};

/// Device operator.
pub trait Operator: Send + Sync + Sized {
    /// Name in errors.
    const NAME: &'static str;

    /// Waits for this rank's own work; [`Operator::close`] finds the error again.
    fn settle(&self);

    /// Ends it on all ranks.
    fn close(self, fabric: &Fabric, deadline: Time) -> Result<(), Error>;
}

/// Operator, or `None` once closed. Calls share the lock, and `close` waits for them without the GIL: a call that finds
/// the lock taken came after `close`.
pub struct Held<T: Operator>(RwLock<Option<T>>);

impl<T: Operator> Held<T> {
    pub fn new(operator: T) -> Held<T> {
        Held(RwLock::new(Some(operator)))
    }

    /// Runs `work` with the operator.
    pub fn run<V, E: Into<Error>>(
        &self,
        work: impl FnOnce(&T) -> Result<V, E>,
    ) -> Result<V, Error> {
        let guard = match self.0.try_read() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(Error::Closed(T::NAME)),
        };
        work(guard.as_ref().ok_or(Error::Closed(T::NAME))?).map_err(Into::into)
    }

    /// Ends it on all ranks in `shared`, or only here in an in-process group. No effect in a forked child.
    pub fn close(&self, py: Python<'_>, shared: Option<&Shared>, timeout: f64) -> PyResult<()> {
        if fork::is_child() {
            return Ok(());
        }
        let Some(shared) = shared else {
            py.detach(|| drop(self.take()));
            return Ok(());
        };
        // Waits for this rank's own work without the communicator, which other threads may need meanwhile.
        let taken = py.detach(|| self.take().inspect(T::settle));
        let Some(operator) = taken else { return Ok(()) };
        shared.wait(py, timeout, |fabric, waiter| operator.close(fabric, waiter.deadline))
    }

    /// Ends it on this rank only. No effect in a forked child.
    pub fn abandon(&self, py: Python<'_>) {
        if !fork::is_child() {
            py.detach(|| drop(self.take()));
        }
    }

    /// Takes the operator out, once calls in progress have returned.
    fn take(&self) -> Option<T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<T: Operator> Drop for Held<T> {
    fn drop(&mut self) {
        let Some(operator) = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        // A forked child's device and memory belong to the parent.
        if fork::is_child() {
            std::mem::forget(operator);
            return;
        }
        // Without the GIL: other Python threads may have to launch the kernels that the device waits for.
        Python::try_attach(|py| py.detach(|| drop(operator)));
    }
}
