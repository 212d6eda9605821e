//! Scenarios on the network model.

use crate::errors::Error;
use pyo3::prelude::*;

/// Runs a scenario, JSON in and JSON out. `progress`, if given, is called repeatedly with the share done and the
/// present step; a result of False stops the run, as does an exception, that of Ctrl-C included.
#[pyfunction]
#[pyo3(signature = (spec, progress = None))]
pub fn simulate(py: Python<'_>, spec: &str, progress: Option<Py<PyAny>>) -> PyResult<String> {
    let mut raised: Option<PyErr> = None;
    let outcome = py.detach(|| {
        weft_predict::run(spec, &mut |share, doing| {
            Python::attach(|py| {
                let asked = py.check_signals().and_then(|()| match &progress {
                    None => Ok(true),
                    Some(progress) => {
                        let answer = progress.bind(py).call1((share, doing))?;
                        Ok(answer.is_none() || answer.is_truthy()?)
                    }
                });
                asked.unwrap_or_else(|error| {
                    raised = Some(error);
                    false
                })
            })
        })
    });
    match raised {
        Some(error) => Err(error),
        None => Ok(outcome.map_err(Error::from)?),
    }
}

/// The schedule of a job with all operations, JSON in and JSON out.
#[pyfunction]
pub fn schedule(py: Python<'_>, job: &str) -> PyResult<String> {
    Ok(py.detach(|| weft_predict::collective::schedule(job)).map_err(Error::from)?)
}
