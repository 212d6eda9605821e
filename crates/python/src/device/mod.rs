//! MoE dispatch and combine between GPUs for `weft.cuda`: addresses and streams in, launches out.
//!
//! A call must cost little, so it keeps the GIL and takes no lock but a shared one, unless it can wait:
//! then it gives up the GIL first.

mod defines;
mod domain;
mod options;

pub use defines::{device_defines, device_source};
pub use domain::{Domains, SymmetricMemory, table_fields};
pub use options::device_options;

use crate::communicator::Communicator;
use crate::errors::{Error, raise};
use crate::fork;
use crate::numbers::WorldSize;
use crate::shared::{Shared, deadline};
use options::Options;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock, TryLockError};
use weft_cuda::Stream;
use weft_moe::Error as MoeError;
use weft_moe::device::{
    Build, DeviceAllToAll as Moe, DeviceShape, DispatchInputs, DispatchOutputs, Site,
};

/// Dispatch and combine on a device: see `weft.cuda.AllToAll`.
#[pyclass(frozen, module = "weft._native")]
pub struct DeviceAllToAll {
    /// `None` in a group that lives in this process.
    shared: Option<Shared>,
    /// `None` once closed. Calls share the lock, and whoever closes does not wait for them holding the
    /// GIL; so a call that finds it taken is one too late.
    moe: RwLock<Option<Moe>>,
    shape: DeviceShape,
    /// Whether receive halves wait on the calling thread.
    waits: bool,
    num_sms: u32,
    made: Build,
}

/// What was closed, for the error.
const CLOSED: Error = Error::Closed("the all-to-all");

impl DeviceAllToAll {
    fn new(shared: Option<Shared>, moe: Moe) -> DeviceAllToAll {
        DeviceAllToAll {
            shared,
            shape: moe.shape().clone(),
            waits: moe.is_twin(),
            num_sms: moe.num_sms(),
            made: moe.build(),
            moe: RwLock::new(Some(moe)),
        }
    }

    fn run<T>(&self, work: impl FnOnce(&Moe) -> Result<T, MoeError>) -> Result<T, Error> {
        let guard = match self.moe.try_read() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(CLOSED),
        };
        Ok(work(guard.as_ref().ok_or(CLOSED)?)?)
    }

    /// A call that puts work on a stream and returns; the twin's send halves do theirs.
    fn call<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Moe) -> Result<T, MoeError>,
    ) -> PyResult<T> {
        fork::check(py)?;
        Ok(self.run(work)?)
    }

    /// A call that waits if this is a twin.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Moe) -> Result<T, MoeError> + Send,
    ) -> PyResult<T> {
        fork::check(py)?;
        if !self.waits {
            return Ok(self.run(work)?);
        }
        // The lock is given back before the GIL is asked for.
        Ok(py.detach(|| self.run(work))?)
    }

    /// Takes it away from everybody, once calls under way have returned.
    fn take(&self) -> Option<Moe> {
        self.moe.write().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl DeviceAllToAll {
    #[new]
    #[pyo3(signature = (communicator, *, device, **options))]
    fn make(
        py: Python<'_>,
        communicator: &Communicator,
        device: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<DeviceAllToAll> {
        let options = Options::of(options)?;
        let shared = communicator.shared.clone();
        let (ranks, rank) = shared.with(py, |f| Ok((f.world_size(), f.rank().0)))?;
        let config = options.config(py, ranks, rank)?;
        let setup = options.setup(py, device)?;
        let deadline = deadline(options.timeout);
        let domains = shared.domains.clone();
        let moe = shared.with(py, |fabric| {
            let made: Result<_, MoeError> = domains.with(fabric, setup.place, deadline, |domain| {
                Moe::over(fabric, config, &setup, deadline, domain)
            });
            Ok(made?)
        })?;
        Ok(DeviceAllToAll::new(Some(shared), moe))
    }

    /// All ranks in this process, in rank order.
    #[staticmethod]
    #[pyo3(signature = (world_size, devices, **options))]
    fn local_group(
        py: Python<'_>,
        world_size: WorldSize,
        devices: Vec<String>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Vec<DeviceAllToAll>> {
        fork::check(py)?;
        fork::watch();
        let WorldSize(world_size) = world_size;
        if devices.len() != world_size as usize {
            let given = devices.len();
            let message =
                format!("{given} devices are given for {world_size} ranks: give each one");
            return Err(raise(py, "ConfigurationError", &message));
        }
        let options = Options::of(options)?;
        let config = options.config(py, world_size, 0)?;
        let setups = devices.iter().map(|device| options.setup(py, device));
        let setups = setups.collect::<PyResult<Vec<_>>>()?;
        let ranks = py.detach(|| Moe::local_group(&config, &setups)).map_err(Error::from)?;
        Ok(ranks.into_iter().map(|moe| DeviceAllToAll::new(None, moe)).collect())
    }

    /// The most positions of a rank in one round.
    #[getter]
    fn positions(&self) -> u32 {
        self.shape.positions()
    }

    /// How tokens travel.
    #[getter]
    fn path(&self) -> &'static str {
        self.shape.path().name()
    }

    /// Multiprocessors that a dispatch takes; 0 for a twin.
    #[getter]
    fn num_sms(&self) -> u32 {
        self.num_sms
    }

    /// The first and one past the last expert of this rank.
    #[getter]
    fn local_experts(&self) -> (u32, u32) {
        let experts = self.shape.placement().experts_of(self.shape.config().rank);
        (experts.start, experts.end)
    }

    /// How its kernels were made: seconds, and whether they were cached.
    #[getter]
    fn build<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let build = PyDict::new(py);
        build.set_item("seconds", self.made.seconds)?;
        build.set_item("cached", self.made.cached)?;
        Ok(build)
    }

    /// What it takes in memory: a table, and bytes in all.
    fn sizes(&self) -> (String, u64) {
        (self.shape.to_string(), self.shape.heap_bytes())
    }

    /// Where rows land: address, bytes from one row to the next, rows.
    fn received(&self, py: Python<'_>, channel: u32) -> PyResult<(u64, u64, u32)> {
        let landed = self.call(py, |moe| moe.landed(channel))?;
        Ok((landed.address, landed.stride, landed.rows))
    }

    /// Starts the send half of dispatch.
    #[pyo3(signature = (stream, channel, tokens, scales, ids, weights, count, given, *, num_sms=None))]
    #[allow(clippy::too_many_arguments)]
    fn dispatch_send(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        tokens: u64,
        scales: u64,
        ids: u64,
        weights: u64,
        count: u64,
        given: u32,
        num_sms: Option<u32>,
    ) -> PyResult<()> {
        let site = Site { stream: Stream(stream), channel, num_sms };
        let inputs = DispatchInputs { tokens, scales, ids, weights, count, given };
        // SAFETY: the Python layer has checked the tensors' shapes, and torch keeps their memory for what
        // is on the stream.
        self.call(py, |moe| unsafe { moe.dispatch_send(site, &inputs) })
    }

    /// Starts the receive half of dispatch.
    #[pyo3(signature = (stream, channel, tokens, scales, counts, offsets, rows, weights, *, num_sms=None))]
    #[allow(clippy::too_many_arguments)]
    fn dispatch_recv(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        tokens: u64,
        scales: u64,
        counts: u64,
        offsets: u64,
        rows: u64,
        weights: u64,
        num_sms: Option<u32>,
    ) -> PyResult<()> {
        let site = Site { stream: Stream(stream), channel, num_sms };
        let outputs = DispatchOutputs { tokens, scales, counts, offsets, rows, weights };
        // SAFETY: as in `dispatch_send`; the outputs were made for this call.
        self.wait(py, |moe| unsafe { moe.dispatch_recv(site, &outputs) })
    }

    /// Starts both halves of dispatch.
    #[pyo3(signature = (stream, channel, tokens, scales, ids, weights, count, given, out_tokens,
        out_scales, out_counts, out_offsets, out_rows, out_weights, /, *, num_sms=None))]
    #[allow(clippy::too_many_arguments)]
    fn dispatch(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        tokens: u64,
        scales: u64,
        ids: u64,
        weights: u64,
        count: u64,
        given: u32,
        out_tokens: u64,
        out_scales: u64,
        out_counts: u64,
        out_offsets: u64,
        out_rows: u64,
        out_weights: u64,
        num_sms: Option<u32>,
    ) -> PyResult<()> {
        let site = Site { stream: Stream(stream), channel, num_sms };
        let inputs = DispatchInputs { tokens, scales, ids, weights, count, given };
        let outputs = DispatchOutputs {
            tokens: out_tokens,
            scales: out_scales,
            counts: out_counts,
            offsets: out_offsets,
            rows: out_rows,
            weights: out_weights,
        };
        // SAFETY: as in the halves.
        self.wait(py, |moe| unsafe { moe.dispatch(site, &inputs, &outputs) })
    }

    /// Starts the send half of combine, or of what takes its place at a release.
    #[pyo3(signature = (stream, channel, outputs, release, *, num_sms=None))]
    #[allow(clippy::too_many_arguments)]
    fn combine_send(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        outputs: u64,
        release: bool,
        num_sms: Option<u32>,
    ) -> PyResult<()> {
        let site = Site { stream: Stream(stream), channel, num_sms };
        // SAFETY: as in `dispatch_send`.
        self.call(py, |moe| unsafe { moe.combine_send(site, outputs, release) })
    }

    /// Starts the receive half of combine.
    #[pyo3(signature = (stream, channel, combined, count, given, release, *, num_sms=None))]
    #[allow(clippy::too_many_arguments)]
    fn combine_recv(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        combined: u64,
        count: u64,
        given: u32,
        release: bool,
        num_sms: Option<u32>,
    ) -> PyResult<()> {
        let site = Site { stream: Stream(stream), channel, num_sms };
        // SAFETY: as in `dispatch_recv`.
        self.wait(py, |moe| unsafe { moe.combine_recv(site, combined, count, given, release) })
    }

    /// Starts both halves of combine.
    #[pyo3(signature = (stream, channel, outputs, combined, count, given, release, *, num_sms=None))]
    #[allow(clippy::too_many_arguments)]
    fn combine(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        outputs: u64,
        combined: u64,
        count: u64,
        given: u32,
        release: bool,
        num_sms: Option<u32>,
    ) -> PyResult<()> {
        let site = Site { stream: Stream(stream), channel, num_sms };
        // SAFETY: as in the halves.
        self.wait(py, |moe| unsafe { moe.combine(site, outputs, combined, count, given, release) })
    }

    /// Raises what the device recorded; what does not end the group is forgotten then.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, Moe::check)
    }

    /// Gives all memory back; every rank calls this. In a forked child it only forgets.
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        if fork::is_child() {
            return Ok(());
        }
        let Some(shared) = &self.shared else {
            py.detach(|| drop(self.take()));
            return Ok(());
        };
        // This rank's own work is waited for without the communicator, which others may need meanwhile.
        let taken = py.detach(|| {
            let taken = self.take();
            taken.inspect(|moe| {
                // What went wrong there, `close` finds again.
                let _ = moe.settle();
            })
        });
        let Some(moe) = taken else { return Ok(()) };
        shared.wait(py, timeout, |fabric, waiter| Ok(moe.close(fabric, waiter.deadline)?))
    }

    /// Ends it on this rank alone. In a forked child it only forgets.
    fn abandon(&self, py: Python<'_>) {
        if !fork::is_child() {
            py.detach(|| end(self.take()));
        }
    }
}

impl Drop for DeviceAllToAll {
    fn drop(&mut self) {
        let moe = self.moe.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if moe.is_some() {
            // Waiting for the device must keep no other thread of Python's from launching what the
            // device waits for.
            Python::try_attach(|py| py.detach(|| end(moe)));
        }
    }
}

/// Waits until the device is done, and frees. The device and the memory of a forked child are its parent's.
fn end(moe: Option<Moe>) {
    if fork::is_child() {
        std::mem::forget(moe);
    }
}

/// Has NVRTC looked for in this directory too, before its first use.
#[pyfunction]
pub fn add_nvrtc_directory(directory: PathBuf) {
    weft_cuda::nvrtc::add_search_path(directory);
}
