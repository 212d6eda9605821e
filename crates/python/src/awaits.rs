//! Awaits for an asyncio loop: watches whose ends a descriptor reports.
//!
//! The thread that ends a watch records the outcome and writes to the loop's event descriptor, without the GIL. The
//! loop then takes the outcomes.

use crate::errors::Error;
use crate::fork;
use crate::shared::Shared;
use pyo3::prelude::*;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weft_control::pair::descriptor_error;
use weft_fabric::{Error as FabricError, ProgressDemand, Time, WatchCondition, WatchId, clock};

/// Ended awaits of one asyncio loop, over all communicators.
#[pyclass(frozen, module = "weft._native")]
pub struct Awaits {
    ended: Arc<EndedAwaits>,
}

/// An await's number, and the outcome.
type Outcome = (u64, Result<(), Error>);

struct EndedAwaits {
    /// Readable while there are outcomes.
    readable: UnixStream,
    end: UnixStream,
    outcomes: Mutex<Vec<Outcome>>,
}

impl EndedAwaits {
    fn lock(&self) -> MutexGuard<'_, Vec<Outcome>> {
        self.outcomes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, number: u64, outcome: Result<(), Error>) {
        let mut outcomes = self.lock();
        outcomes.push((number, outcome));
        if outcomes.len() == 1 {
            // There is room: a take removes the byte.
            let _ = (&self.end).write(&[0]);
        }
    }

    fn take(&self) -> Vec<Outcome> {
        let mut outcomes = self.lock();
        let _ = (&self.readable).read(&mut [0]);
        std::mem::take(&mut *outcomes)
    }
}

#[pymethods]
impl Awaits {
    #[new]
    fn new() -> PyResult<Awaits> {
        let pair = UnixStream::pair().and_then(|(readable, end)| {
            readable.set_nonblocking(true)?;
            end.set_nonblocking(true)?;
            Ok((readable, end))
        });
        let (readable, end) = pair.map_err(|error| {
            Error::from(descriptor_error("preparing awaits in an asyncio loop", error))
        })?;
        let ended = EndedAwaits { readable, end, outcomes: Mutex::default() };
        Ok(Awaits { ended: Arc::new(ended) })
    }

    /// Readable while awaits have ended that were not taken.
    fn fileno(&self) -> i32 {
        self.ended.readable.as_raw_fd()
    }

    /// Takes the awaits that have ended: number, and the error or `None`.
    fn take(&self, py: Python<'_>) -> Vec<(u64, Option<Py<PyAny>>)> {
        let exception = |error| PyErr::from(error).into_value(py).into_any();
        let ended = self.ended.take().into_iter();
        ended.map(|(number, outcome)| (number, outcome.err().map(exception))).collect()
    }
}

/// An await that has not ended. It reports the outcome once it was accepted, also if it is dropped with the engine.
struct PendingAwait {
    ended: Option<Arc<EndedAwaits>>,
    number: u64,
    accepted: Arc<AtomicBool>,
    /// A thread makes progress until the await has ended.
    _demand: ProgressDemand,
}

impl PendingAwait {
    fn end(&mut self, outcome: Result<(), FabricError>) {
        if let Some(ended) = self.ended.take()
            && self.accepted.load(Ordering::Relaxed)
        {
            ended.push(self.number, outcome.map_err(Error::from));
        }
    }
}

impl Drop for PendingAwait {
    fn drop(&mut self) {
        self.end(Err(weft_control::Error::Closed.into()));
    }
}

/// An await in progress.
#[pyclass(frozen, module = "weft._native")]
pub struct Await {
    id: WatchId,
    begin: Time,
    shared: Shared,
    accepted: Arc<AtomicBool>,
}

#[pymethods]
impl Await {
    /// Gives it up, so that it reports nothing: the timeout error, or `None` if it has ended before.
    fn give_up(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        // A closed communicator, or a forked parent's, has ended it.
        let fabric = if fork::is_child() { None } else { self.shared.get() };
        let error = py.detach(|| {
            let fabric = fabric?;
            let mut engine = fabric.engine();
            self.accepted.store(false, Ordering::Relaxed);
            engine.unwatch(self.id, self.begin, clock::now())
        });
        error.map(|error| PyErr::from(Error::from(error)).into_value(py).into_any())
    }
}

/// Starts an await; `None` if the condition holds.
pub fn start(
    shared: &Shared,
    py: Python<'_>,
    awaits: &Awaits,
    number: u64,
    condition: WatchCondition,
) -> PyResult<Option<Await>> {
    let begin = clock::now();
    let accepted = Arc::<AtomicBool>::default();
    let (ended, flag) = (Some(awaits.ended.clone()), accepted.clone());
    let id = shared.with(py, move |fabric| {
        let _demand = fabric.demand_progress()?;
        let mut pending = PendingAwait { ended, number, accepted: flag.clone(), _demand };
        let mut engine = fabric.engine();
        let id = engine.watch(condition, Box::new(move |outcome| pending.end(outcome)))?;
        // The engine's lock is held: the watch has not ended since.
        flag.store(true, Ordering::Relaxed);
        Ok(id)
    })?;
    Ok(id.map(|id| Await { id, begin, shared: shared.clone(), accepted }))
}
