//! Query dispatch for MLPerf: LoadGen tests, queries without it, and accelerator nodes whose model may be a Python
//! callable.

use crate::errors::{Error, raise};
use crate::qdl_lane::{FAILED, LaneBackend};
use crate::{fork, logging};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weft_dispatch::{Backend, Batch, Schema, Threaded};
use weft_qdl::network::End;
use weft_qdl::{Counts, Departure, ModelBackend, Node, NodeConfig, NodeSpec, Spec};

/// Counts in a test or a node, for any thread.
#[pyclass(frozen, module = "weft._native")]
#[derive(Default)]
pub struct QdlCounts(Arc<Counts>);

#[pymethods]
impl QdlCounts {
    #[new]
    fn new() -> QdlCounts {
        QdlCounts::default()
    }

    /// Queries issued, answered and failed, and peers.
    fn snapshot(&self) -> (u64, u64, u64, u64) {
        let now = self.0.snapshot();
        (now.issued, now.answered, now.failed, now.peers)
    }

    /// Name and cause for each node that left or was lost, and whether it was lost.
    fn departures(&self) -> Vec<(String, String, bool)> {
        departures(&self.0)
    }
}

fn departures(counts: &Counts) -> Vec<(String, String, bool)> {
    let tuple = |each: Departure| (each.name, each.cause, each.lost);
    counts.departures().into_iter().map(tuple).collect()
}

/// Runs a test, JSON in and JSON out; it cannot be interrupted.
#[pyfunction]
pub fn qdl_test(py: Python<'_>, spec: &str, counts: &QdlCounts) -> PyResult<String> {
    fork::check(py)?;
    fork::watch();
    logging::install();
    let outcome = py.detach(|| weft_qdl::run(&Spec::from_json(spec)?, &counts.0));
    Ok(outcome.map_err(Error::Qdl)?.to_json())
}

/// Answers to queries with each tensor's bytes, or failure causes; answer and failure counts over all
/// submissions, and the seconds that they took. The call takes at most `milliseconds`; with `seconds`, the queries are
/// sent again and again for that time, and each has these milliseconds.
#[pyfunction]
#[pyo3(signature = (addresses, queries, provider, slots, checksum, milliseconds, seconds))]
#[expect(clippy::too_many_arguments, reason = "weft.qdl.ask has defaults for all")]
pub fn qdl_ask<'py>(
    py: Python<'py>,
    addresses: Vec<String>,
    queries: Vec<Vec<Vec<u8>>>,
    provider: Option<&str>,
    slots: u32,
    checksum: bool,
    milliseconds: u64,
    seconds: f64,
) -> PyResult<(Bound<'py, PyList>, u64, u64, f64)> {
    fork::check(py)?;
    fork::watch();
    logging::install();
    let interrupt = Arc::<AtomicBool>::default();
    let mut end = End { slots, checksum, interrupt: Some(interrupt.clone()), ..End::default() };
    if let Some(name) = provider {
        end.providers = End::providers_named(name).map_err(Error::Qdl)?;
    }
    let patience = Duration::from_millis(milliseconds);
    let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    let ask = move || weft_qdl::ask::ask(&addresses, &end, &queries, patience, time);
    let asked = interruptible(py, "weft-ask", &interrupt, ask)?.map_err(Error::Qdl)?;
    let answers = PyList::empty(py);
    for answer in asked.answers {
        match answer {
            Ok(tensors) => {
                let tensors = tensors.iter().map(|tensor| PyBytes::new(py, tensor));
                answers.append(PyList::new(py, tensors.collect::<Vec<_>>())?)?;
            }
            Err(cause) => answers.append(cause)?,
        }
    }
    Ok((answers, asked.answered, asked.failed, asked.elapsed.as_secs_f64()))
}

/// Runs `work` on a thread, while this one waits and runs signal handlers. A handler's exception raises the
/// interrupt, by which the work ends, and is returned; work that goes on for long is left to the thread.
fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    interrupt: &AtomicBool,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, mut result) = sync_channel(1);
    let started = std::thread::Builder::new()
        .name(name.into())
        // The receiver may have given up.
        .spawn(move || drop(sender.send(work())));
    if let Err(error) = started {
        let error = weft_control::Error::thread("a thread of query dispatch")(error);
        return Err(Error::from(weft_fabric::Error::from(error)).into());
    }
    let mut raised = None;
    loop {
        let wait = if raised.is_some() { INTERRUPTED_WORK } else { SIGNAL_INTERVAL };
        let (received, receiver) = py.detach(move || (result.recv_timeout(wait), result));
        result = receiver;
        match (received, raised.take()) {
            (Ok(done), None) => return Ok(done),
            (_, Some(error)) => return Err(error),
            (Err(RecvTimeoutError::Disconnected), None) => {
                return Err(raise(py, "SystemCallError", "a thread ended without a result"));
            }
            (Err(RecvTimeoutError::Timeout), None) => raised = py.check_signals().err(),
        }
        if raised.is_some() {
            interrupt.store(true, Ordering::Relaxed);
        }
    }
}

/// Time between two looks for signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for interrupted work to end.
const INTERRUPTED_WORK: Duration = Duration::from_secs(1);

/// Accelerator node.
#[pyclass(frozen, module = "weft._native")]
pub struct QdlNode {
    node: Mutex<Option<ServedNode>>,
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    address: String,
    name: String,
}

#[pymethods]
impl QdlNode {
    /// Listens. `callable` takes a batch's query count, and for each input all queries' bytes and
    /// each one's size; it returns the same for each output, or `None` once the node has stopped. With `lanes` it takes
    /// a lane, the query count, and for each input each query's bytes: see [`LaneBackend`].
    #[new]
    #[pyo3(signature = (spec, callable, lanes=Vec::new()))]
    fn new(
        py: Python<'_>,
        spec: &str,
        callable: Option<Py<PyAny>>,
        lanes: Vec<Py<PyAny>>,
    ) -> PyResult<QdlNode> {
        fork::check(py)?;
        fork::watch();
        logging::install();
        let counts = Arc::new(Counts::default());
        if let (Some(callable), false) = (&callable, lanes.is_empty()) {
            let spec = NodeSpec::from_json(spec).map_err(Error::Qdl)?;
            let mut config = spec.config().map_err(Error::Qdl)?;
            // Inputs in neighbouring slots are one copy.
            config.batches.by_slot = true;
            let backends = LaneBackend::of(py, lanes, callable, &config.schema, &counts)?;
            let executor = |waker| Threaded::new(backends, waker);
            let bound = py.detach(|| Node::bind_with(config, executor, counts.clone()));
            return Ok(QdlNode::of(ServedNode::Threaded(bound.map_err(Error::Qdl)?), counts));
        }
        let bound = py.detach(|| -> weft_qdl::Result<_> {
            let spec = NodeSpec::from_json(spec)?;
            let config = spec.config()?;
            let (schema, model) = (config.schema.clone(), spec.model);
            let Some(callable) = callable else {
                let bytes = schema.outputs[0].max_bytes();
                let backend = ModelBackend::new(model, bytes, counts.clone())?;
                return match model.work_us {
                    0 => Ok(ServedNode::Inline(Node::bind(config, backend, counts.clone())?)),
                    _ => threaded(config, backend, counts.clone()),
                };
            };
            let backend = CallableBackend { callable, schema, counts: counts.clone() };
            threaded(config, backend, counts.clone())
        });
        Ok(QdlNode::of(bound.map_err(Error::Qdl)?, counts))
    }

    /// `host:port` at which it listens.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Name that front ends get.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Serves until `stop`, in this thread. Once.
    fn serve(&self, py: Python<'_>) -> PyResult<()> {
        fork::check(py)?;
        let node = self.node.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(node) = node else {
            return Err(raise(py, "ClosedError", "the accelerator node serves or has ended"));
        };
        let served = py.detach(move || match node {
            ServedNode::Inline(node) => node.serve(),
            ServedNode::Threaded(node) => node.serve(),
        });
        Ok(served.map_err(Error::Qdl)?)
    }

    /// Closes a node that does not serve.
    fn close(&self, py: Python<'_>) {
        let node = self.node.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(node));
    }

    /// Cause for each lost front end.
    fn departures(&self) -> Vec<(String, String, bool)> {
        departures(&self.counts)
    }

    /// Ends `serve`.
    fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Queries that have arrived, were answered and have failed, and front ends.
    fn counts(&self) -> (u64, u64, u64, u64) {
        let now = self.counts.snapshot();
        (now.issued, now.answered, now.failed, now.peers)
    }
}

impl QdlNode {
    fn of(node: ServedNode, counts: Arc<Counts>) -> QdlNode {
        let (stop, address, name) = match &node {
            ServedNode::Inline(node) => (node.stop_flag(), node.address(), node.name()),
            ServedNode::Threaded(node) => (node.stop_flag(), node.address(), node.name()),
        };
        let (address, name) = (address.to_string(), name.to_owned());
        QdlNode { stop, counts, address, name, node: Mutex::new(Some(node)) }
    }
}

/// A node whose model runs between two polls, or one with a thread for the model.
enum ServedNode {
    Inline(Node<ModelBackend>),
    Threaded(Node<Threaded>),
}

/// A node that runs batches on a thread, so that it polls and answers meanwhile.
fn threaded(
    config: NodeConfig,
    backend: impl Backend + Send + 'static,
    counts: Arc<Counts>,
) -> weft_qdl::Result<ServedNode> {
    let executor = |waker| Threaded::new([backend], waker);
    Ok(ServedNode::Threaded(Node::bind_with(config, executor, counts)?))
}

/// Backend that calls Python once for each batch.
struct CallableBackend {
    callable: Py<PyAny>,
    schema: Schema,
    counts: Arc<Counts>,
}

impl Backend for CallableBackend {
    fn run(&mut self, batch: &mut Batch<'_>) {
        let queries = batch.len() as u64;
        self.counts.add_issued(queries);
        let is_answered = Python::attach(|py| {
            self.call(py, batch).unwrap_or_else(|error| {
                error.write_unraisable(py, Some(self.callable.bind(py)));
                false
            })
        });
        if is_answered {
            return self.counts.add_answered(queries);
        }
        for query in 0..batch.len() {
            batch.fail(query, FAILED);
        }
        self.counts.add_failed(queries);
    }
}

impl CallableBackend {
    /// Calls Python and copies the outputs; false if the node has stopped.
    fn call(&self, py: Python<'_>, batch: &mut Batch<'_>) -> PyResult<bool> {
        let inputs = PyList::empty(py);
        for tensor in 0..self.schema.inputs.len() {
            let lengths: Vec<usize> =
                (0..batch.len()).map(|query| batch.input(query, tensor).len()).collect();
            let bytes = PyBytes::new_with(py, lengths.iter().sum(), |mut rest| {
                for query in 0..batch.len() {
                    let input = batch.input(query, tensor);
                    let (part, behind) = rest.split_at_mut(input.len());
                    part.copy_from_slice(input);
                    rest = behind;
                }
                Ok(())
            })?;
            inputs.append((bytes, lengths))?;
        }
        let outputs = self.callable.bind(py).call1((batch.len(), inputs))?;
        let outputs: Option<Vec<(Bound<'_, PyBytes>, Vec<usize>)>> = outputs.extract()?;
        let Some(outputs) = outputs else { return Ok(false) };
        let expected = self.schema.outputs.len();
        if outputs.len() != expected || outputs.iter().any(|(_, each)| each.len() != batch.len()) {
            let text =
                format!("{} outputs: expected {expected}, each of all queries", outputs.len());
            return Err(raise(py, "ShapeError", &text));
        }
        for (tensor, (bytes, lengths)) in outputs.iter().enumerate() {
            let mut rest = bytes.as_bytes();
            for (query, &length) in lengths.iter().enumerate() {
                let wrong = || {
                    let text = format!("{length} bytes of {}", self.schema.outputs[tensor]);
                    raise(py, "ShapeError", &text)
                };
                let (part, behind) = rest.split_at_checked(length).ok_or_else(wrong)?;
                if !batch.resize(query, tensor, length as u64) {
                    return Err(wrong());
                }
                batch.output(query, tensor).copy_from_slice(part);
                rest = behind;
            }
        }
        Ok(true)
    }
}
