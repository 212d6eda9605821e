//! Scenarios on the network model.

use crate::errors::Error;
use crate::interruptible::{interruptible, interruptible_with_progress};
use pyo3::prelude::*;

/// Runs a scenario, JSON in and JSON out. `progress`, if given, is called repeatedly with the share done and the
/// present stage; a False result stops the run, as does an exception. Ctrl-C ends the call at any stage.
#[pyfunction]
#[pyo3(signature = (spec, progress = None))]
pub fn simulate(
    py: Python<'_>,
    spec: String,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<String> {
    let answer = |share: f64, stage: &str| match &progress {
        None => Ok(true),
        Some(progress) => {
            let answer = progress.call1((share, stage))?;
            Ok(answer.is_none() || answer.is_truthy()?)
        }
    };
    let outcome = interruptible_with_progress(py, answer, move |progress| {
        weft_predict::run(&spec, progress)
    })?;
    Ok(outcome.map_err(Error::from)?)
}

/// A job's schedule with all operations, JSON in and JSON out.
#[pyfunction]
pub fn schedule(py: Python<'_>, job: String) -> PyResult<String> {
    let schedule = interruptible(py, move || weft_predict::collective::schedule(&job))?;
    Ok(schedule.map_err(Error::from)?)
}
