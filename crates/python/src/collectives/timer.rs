//! Collective timer for `weft tune`.

use crate::communicator::Communicator;
use crate::errors::raise;
use crate::shared::{Shared, deadline};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};
use weft_collectives::tuning::{TuningSource, candidates};
use weft_collectives::{Algorithm, CallTimer, Collective, Options, Rank, Timed, memory_rates};

/// Measurement file name, text, and this machine.
pub type Source = (String, String, String);

/// Borrowed measurement file.
pub fn source(tuning: &Option<Source>) -> Option<TuningSource<'_>> {
    let (name, text, machine) = tuning.as_ref()?;
    Some(TuningSource { name, text, machine })
}

/// Collective timer on a communicator. Every rank makes the same calls.
#[pyclass(frozen)]
pub struct CollectiveTimer {
    shared: Shared,
    timer: Mutex<CallTimer>,
}

#[pymethods]
impl CollectiveTimer {
    #[new]
    #[pyo3(signature = (communicator, timeout, tuning=None))]
    fn new(
        py: Python<'_>,
        communicator: &Communicator,
        timeout: f64,
        tuning: Option<Source>,
    ) -> PyResult<CollectiveTimer> {
        let shared = communicator.shared.clone();
        let timer = shared.with(py, |fabric| {
            Ok(CallTimer::connect(fabric, source(&tuning), deadline(timeout))?)
        })?;
        Ok(CollectiveTimer { shared, timer: Mutex::new(timer) })
    }

    /// Vector bytes, and mean seconds over `calls` calls.
    #[allow(clippy::too_many_arguments)]
    fn time(
        &self,
        py: Python<'_>,
        collective: &str,
        algorithm: &str,
        chunks: u32,
        bytes: u64,
        calls: u32,
        timeout: f64,
    ) -> PyResult<(u64, f64)> {
        let collective = named(py, collective)?;
        let algorithm: Algorithm =
            algorithm.parse().map_err(|error| configuration(py, &format!("{error}")))?;
        let options = Options { chunks, ..Options::default() };
        let Timed { bytes, seconds } = self.shared.wait(py, timeout, |fabric, waiter| {
            let choice = (algorithm, options);
            Ok(self.lock().time(fabric, collective, choice, bytes, calls, waiter)?)
        })?;
        Ok((bytes, seconds))
    }

    /// Algorithm selected for a `bytes`-byte vector, and the chunk count.
    fn selected(
        &self,
        py: Python<'_>,
        collective: &str,
        bytes: u64,
    ) -> PyResult<(&'static str, u32)> {
        let collective = named(py, collective)?;
        let (algorithm, options) = self
            .shared
            .with(py, |fabric| Ok(self.lock().selected(fabric, collective, bytes)?))?;
        Ok((algorithm.name(), options.chunks))
    }

    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.shared.wait(py, timeout, |fabric, waiter| Ok(self.lock().close(fabric, waiter)?))
    }

    /// Algorithms that are measured, with chunk counts.
    #[staticmethod]
    fn candidates(py: Python<'_>, collective: &str) -> PyResult<Vec<(&'static str, u32)>> {
        let all = candidates(named(py, collective)?);
        Ok(all.map(|(algorithm, options)| (algorithm.name(), options.chunks)).collect())
    }

    /// Seconds to copy a byte, and to add one, in this process's memory.
    #[staticmethod]
    fn memory_rates(py: Python<'_>) -> (f64, f64) {
        py.detach(memory_rates)
    }
}

impl CollectiveTimer {
    fn lock(&self) -> MutexGuard<'_, CallTimer> {
        self.timer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn named(py: Python<'_>, name: &str) -> PyResult<Collective> {
    match name {
        "all-reduce" => Ok(Collective::AllReduce),
        "reduce-scatter" => Ok(Collective::ReduceScatter),
        "all-gather" => Ok(Collective::AllGather),
        "broadcast" => Ok(Collective::Broadcast { root: Rank(0) }),
        "all-to-all" => Ok(Collective::AllToAll),
        _ => Err(configuration(py, &format!("collective {name:?}: not known"))),
    }
}

fn configuration(py: Python<'_>, text: &str) -> PyErr {
    raise(py, "ConfigurationError", text)
}
