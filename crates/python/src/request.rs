//! Requests for Python.

use crate::awaits::{self, Await, Awaits};
use crate::shared::Shared;
use pyo3::prelude::*;
use weft_fabric::{RequestId, WatchCondition};

/// A request in flight.
#[pyclass(frozen, module = "weft._native")]
pub struct Request {
    pub id: RequestId,
    pub shared: Shared,
}

#[pymethods]
impl Request {
    /// True if it has ended.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.shared.with(py, |fabric| {
            let mut engine = fabric.engine();
            engine.progress();
            Ok(engine.is_drained(self.id))
        })
    }

    /// Starts an await with this number; `None` if the request has ended.
    fn start_await(
        &self,
        py: Python<'_>,
        awaits: PyRef<'_, Awaits>,
        number: u64,
    ) -> PyResult<Option<Await>> {
        awaits::start(&self.shared, py, &awaits, number, WatchCondition::Ended(self.id))
    }

    /// Waits until it has ended.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.shared.wait(
            py,
            timeout,
            |fabric, waiter| Ok(fabric.wait_for_request(self.id, waiter)?),
        )
    }
}
