//! Backend for an accelerator node whose model takes and returns device memory: copies between slots and buffers
//! around a Python call.

use crate::errors::{Error, raise};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};
use weft_cuda::{Context, Stream};
use weft_dispatch::{Backend, Batch, Schema};
use weft_qdl::Counts;
use weft_qdl::lane::{DevicePlace, Lane, Output, Pins, Place};

/// Code for a query whose callable raised, or returned sizes that the schema does not have.
pub(crate) const FAILED: u32 = 1;

/// A model call's outputs: for each whether it is device memory, the addresses where each query's part starts, and
/// sizes; and an object that keeps that memory.
type Outputs = (Vec<(bool, Vec<u64>, Vec<u64>)>, Py<PyAny>);

/// Backend on one node lane. Each lane has a separate thread, so that one batch's copies overlap another's model
/// run; model calls run one at a time.
///
/// A Python lane has a CUDA device ordinal or `None` (`ordinal`), the copy stream
/// (`stream_handle`), and each input buffer's address (`addresses`). It keeps these alive.
pub struct LaneBackend {
    // Before the object that owns its buffers.
    lane: Lane,
    owner: Py<PyAny>,
    callable: Py<PyAny>,
    schema: Schema,
    counts: Arc<Counts>,
    /// Held during a model call.
    turn: Arc<Mutex<()>>,
}

impl LaneBackend {
    /// A backend for each lane.
    pub fn of(
        py: Python<'_>,
        lanes: Vec<Py<PyAny>>,
        callable: &Py<PyAny>,
        schema: &Schema,
        counts: &Arc<Counts>,
    ) -> PyResult<Vec<LaneBackend>> {
        let (turn, mut pins) = (Arc::default(), None);
        let mut backends = Vec::with_capacity(lanes.len());
        for owner in lanes {
            let ordinal: Option<u32> = owner.getattr(py, "ordinal")?.extract(py)?;
            let stream = owner.getattr(py, "stream_handle")?.extract(py)?;
            let buffers: Vec<u64> = owner.getattr(py, "addresses")?.extract(py)?;
            let place = match ordinal {
                None => Place::Host,
                Some(ordinal) => {
                    let pins = match &pins {
                        Some(pins) => Arc::clone(pins),
                        None => pins.insert(Pins::new(context(ordinal)?)).clone(),
                    };
                    Place::Device(DevicePlace { pins, stream: Stream(stream) })
                }
            };
            // SAFETY: `owner` keeps buffers and stream, which `weft.qdl` made for this schema, and outlives the lane.
            let lane = unsafe { Lane::new(place, schema, buffers) };
            let (callable, schema) = (callable.clone_ref(py), schema.clone());
            let (counts, turn) = (Arc::clone(counts), Arc::clone(&turn));
            backends.push(LaneBackend { lane, owner, callable, schema, counts, turn });
        }
        Ok(backends)
    }

    /// Copies the inputs, calls the model, copies the outputs. No copy is under way afterwards, or the memory is
    /// leaked. False if the node has stopped.
    fn answer(&self, batch: &mut Batch<'_>) -> PyResult<bool> {
        let mut copies = Copies { backend: self, batch, kept: None, have_ended: false };
        self.lane.copy_in(copies.batch).map_err(raised)?;
        let Some((outputs, kept)) = self.call(copies.batch)? else { return Ok(false) };
        copies.kept = Some(kept);
        let batch = &mut *copies.batch;
        for (tensor, (is_on_device, addresses, lengths)) in outputs.into_iter().enumerate() {
            for (query, &length) in lengths.iter().enumerate() {
                if !batch.resize(query, tensor, length) {
                    let text = format!("{length} bytes of {}", self.schema.outputs[tensor]);
                    return Err(Python::attach(|py| raise(py, "ShapeError", &text)));
                }
            }
            let parts = addresses.into_iter().zip(lengths).collect();
            // SAFETY: `copies` keeps the outputs until the copies have ended. They are copies of the model's tensors,
            // which no later call writes, and the lane's stream follows the work that makes them: see `weft.qdl`.
            unsafe { self.lane.copy_out(batch, tensor, &Output { is_on_device, parts }) }
                .map_err(raised)?;
        }
        self.lane.wait().map_err(raised)?;
        copies.have_ended = true;
        Ok(true)
    }

    /// Calls the model; `None` if the node has stopped.
    fn call(&self, batch: &Batch<'_>) -> PyResult<Option<Outputs>> {
        // Taken before the GIL, which the lock's holder waits for.
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let lengths = |tensor| -> Vec<usize> {
            (0..batch.len()).map(|query| batch.input(query, tensor).len()).collect()
        };
        let lengths: Vec<Vec<usize>> = (0..self.schema.inputs.len()).map(lengths).collect();
        Python::attach(|py| {
            let arguments = (self.owner.bind(py), batch.len(), lengths);
            let outputs: Option<Outputs> = self.callable.bind(py).call1(arguments)?.extract()?;
            let Some(outputs) = outputs else { return Ok(None) };
            let expected = self.schema.outputs.len();
            let is_whole = |(_, addresses, lengths): &(bool, Vec<u64>, Vec<u64>)| {
                addresses.len() == batch.len() && lengths.len() == batch.len()
            };
            if outputs.0.len() != expected || !outputs.0.iter().all(is_whole) {
                let found = outputs.0.len();
                let text = format!("{found} outputs: expected {expected}, each of all queries");
                return Err(raise(py, "ShapeError", &text));
            }
            Ok(Some(outputs))
        })
    }
}

impl Backend for LaneBackend {
    fn run(&mut self, batch: &mut Batch<'_>) {
        let queries = batch.len() as u64;
        self.counts.add_issued(queries);
        match self.answer(batch) {
            Ok(true) => return self.counts.add_answered(queries),
            Ok(false) => {}
            Err(error) => {
                Python::attach(|py| error.write_unraisable(py, Some(self.callable.bind(py))));
            }
        }
        for query in 0..batch.len() {
            batch.fail(query, FAILED);
        }
        self.counts.add_failed(queries);
    }
}

/// A batch's copies. Dropping it ends them, also after an error or a panic, before the memory is freed.
struct Copies<'a, 'b> {
    backend: &'a LaneBackend,
    batch: &'a mut Batch<'b>,
    /// Model outputs.
    kept: Option<Py<PyAny>>,
    have_ended: bool,
}

impl Drop for Copies<'_, '_> {
    fn drop(&mut self) {
        if self.have_ended || self.backend.lane.end() {
            return;
        }
        // Copies may be under way from now on: slots, buffers and outputs are never freed.
        log::error!(
            "copies of a batch cannot be awaited; their memory is leaked: start the node anew"
        );
        self.backend.lane.leak(self.batch);
        std::mem::forget(self.kept.take());
        std::mem::forget(Python::attach(|py| self.backend.owner.clone_ref(py)));
    }
}

fn context(ordinal: u32) -> PyResult<Arc<Context>> {
    let device = weft_cuda::driver().and_then(|driver| driver.device(ordinal)).map_err(raised)?;
    Context::primary(device).map_err(raised)
}

fn raised(error: weft_cuda::Error) -> PyErr {
    Error::from(weft_moe::Error::Cuda(error)).into()
}
