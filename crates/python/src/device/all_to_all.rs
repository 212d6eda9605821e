//! Dispatch and combine on a device, as a Python class.

use super::held::{Held, Operator};
use super::options::{memory_location, options_of};
use super::placement::{self, RankExperts, with_placement};
use crate::communicator::Communicator;
use crate::errors::{Error, raise};
use crate::numbers::WorldSize;
use crate::shared::{Shared, deadline};
use crate::{fork, logging};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::time::Duration;
use weft_cuda::Stream;
use weft_fabric::{Communicator as Fabric, Time};
use weft_moe::Error as MoeError;
use weft_moe::device::{
    BuildInfo, CombineOutputs, DeviceAllToAll as Moe, DeviceShape, DispatchInputs, DispatchOutputs,
    LaunchConfig, PlanLocation,
};

/// Dispatch and combine on a device: see `weft.cuda.AllToAll`.
#[pyclass(frozen, module = "weft._native")]
pub struct DeviceAllToAll {
    /// `None` in a group that lives in this process.
    shared: Option<Shared>,
    moe: Held<Moe>,
    shape: DeviceShape,
    /// True if receive halves wait on the calling thread.
    waits: bool,
    num_sms: u32,
    made: BuildInfo,
}

impl Operator for Moe {
    const NAME: &'static str = "the all-to-all";

    fn settle(&self) {
        let _ = Moe::settle(self);
    }

    fn close(self, fabric: &Fabric, deadline: Time) -> Result<(), Error> {
        Ok(Moe::close(self, fabric, deadline)?)
    }
}

impl DeviceAllToAll {
    fn new(shared: Option<Shared>, moe: Moe) -> DeviceAllToAll {
        DeviceAllToAll {
            shared,
            shape: moe.shape().clone(),
            waits: moe.is_twin(),
            num_sms: moe.num_sms(),
            made: moe.build(),
            moe: Held::new(moe),
        }
    }

    /// Shape that all ranks agreed on.
    pub(super) fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    fn run<T>(&self, work: impl FnOnce(&Moe) -> Result<T, MoeError>) -> Result<T, Error> {
        self.moe.run(work)
    }

    /// A call that puts work on a stream and returns; a twin's send half has finished by then.
    pub(super) fn call<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Moe) -> Result<T, MoeError>,
    ) -> PyResult<T> {
        fork::check(py)?;
        Ok(self.run(work)?)
    }

    /// A call that waits if this is a twin.
    pub(super) fn wait<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Moe) -> Result<T, MoeError> + Send,
    ) -> PyResult<T> {
        fork::check(py)?;
        if !self.waits {
            return Ok(self.run(work)?);
        }
        // The lock is released before the GIL is taken.
        Ok(py.detach(|| self.run(work))?)
    }
}

#[pymethods]
impl DeviceAllToAll {
    #[new]
    #[pyo3(signature = (communicator, *, device, placement=None, **options))]
    fn make(
        py: Python<'_>,
        communicator: &Communicator,
        device: &str,
        placement: Option<Vec<RankExperts>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<DeviceAllToAll> {
        let options = options_of(py, options)?;
        let shared = communicator.shared.clone();
        let (ranks, rank) = shared.with(py, |f| Ok((f.world_size(), f.rank().0)))?;
        let config = with_placement(options.config(ranks, rank), placement)?;
        let setup = options.setup(memory_location(py, device, options.creation.memory)?);
        let deadline = deadline(options.creation.timeout.as_secs_f64());
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
    #[pyo3(signature = (world_size, devices, *, placement=None, **options))]
    fn local_group(
        py: Python<'_>,
        world_size: WorldSize,
        devices: Vec<String>,
        placement: Option<Vec<RankExperts>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Vec<DeviceAllToAll>> {
        fork::check(py)?;
        fork::watch();
        logging::install();
        let WorldSize(world_size) = world_size;
        if devices.len() != world_size as usize {
            let given = devices.len();
            let message =
                format!("{given} devices are given for {world_size} ranks: give each one");
            return Err(raise(py, "ConfigurationError", &message));
        }
        let options = options_of(py, options)?;
        let config = with_placement(options.config(world_size, 0), placement)?;
        let place = |device: &String| memory_location(py, device, options.creation.memory);
        let places = devices.iter().map(place).collect::<PyResult<Vec<_>>>()?;
        let setups: Vec<_> = places.into_iter().map(|place| options.setup(place)).collect();
        let ranks = py.detach(|| Moe::local_group(&config, &setups)).map_err(Error::from)?;
        Ok(ranks.into_iter().map(|moe| DeviceAllToAll::new(None, moe)).collect())
    }

    /// A rank's maximum positions in one round.
    #[getter]
    fn positions(&self) -> u32 {
        self.shape.positions()
    }

    /// Bytes in a round's plan.
    #[getter]
    fn plan_bytes(&self) -> u64 {
        self.shape.channel_layout().plan_bytes()
    }

    /// Token transfer path: "packets", "latency" or "bandwidth".
    #[getter]
    fn path(&self) -> &'static str {
        self.shape.path().name()
    }

    /// SMs that a dispatch takes; 0 for a twin.
    #[getter]
    fn num_sms(&self) -> u32 {
        self.num_sms
    }

    /// This rank's first expert and one past its last.
    #[getter]
    fn local_experts(&self) -> (u32, u32) {
        let experts = self.shape.placement().experts_of(self.shape.config().rank);
        (experts.start, experts.end)
    }

    /// Maximum experts on any rank, for which dispatch outputs have room.
    #[getter]
    fn most_local_experts(&self) -> u32 {
        self.shape.local_experts()
    }

    /// Changes which experts ranks hold, by layer; every rank calls this, in an in-process group each by itself.
    fn set_placement(
        &self,
        py: Python<'_>,
        changes: Vec<(u32, RankExperts)>,
        timeout: f64,
    ) -> PyResult<()> {
        fork::check(py)?;
        let maps = placement::maps(self.shape.config().experts, changes)?;
        let Some(shared) = &self.shared else {
            return Ok(py.detach(|| self.run(|moe| moe.set_maps_here(&maps)))?);
        };
        shared.wait(py, timeout, |fabric, waiter| {
            self.run(|moe| moe.set_maps(fabric, &maps, waiter.deadline))
        })
    }

    /// Kernel build: seconds, and true if they were cached.
    #[getter]
    fn build<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let build = PyDict::new(py);
        build.set_item("seconds", self.made.seconds)?;
        build.set_item("cached", self.made.cached)?;
        Ok(build)
    }

    /// Memory: a table by area, and the total in bytes.
    fn sizes(&self) -> (String, u64) {
        (self.shape.to_string(), self.shape.heap_bytes())
    }

    /// Landing area for received rows: address, stride in bytes, rows.
    fn received(&self, py: Python<'_>, channel: u32) -> PyResult<(u64, u64, u32)> {
        let received = self.call(py, |moe| moe.received_rows(channel))?;
        Ok((received.address, received.stride, received.rows))
    }

    /// Starts the dispatch send half.
    #[pyo3(signature = (stream, channel, tokens, scales, ids, weights, count, given, *, num_sms=None, layer=0, plan=0, kept=false, positions=None))]
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
        layer: u32,
        plan: u64,
        kept: bool,
        positions: Option<u32>,
    ) -> PyResult<()> {
        let launch_config = launch_config(stream, channel, num_sms, plan, kept, positions);
        let inputs = DispatchInputs { tokens, scales, ids, weights, count, given, layer };
        // SAFETY: the Python layer has checked the tensors' shapes, and torch keeps the memory for what
        // is on the stream.
        self.call(py, |moe| unsafe { moe.dispatch_send(launch_config, &inputs) })
    }

    /// Starts the dispatch receive half.
    #[pyo3(signature = (stream, channel, tokens, scales, counts, offsets, rows, weights, *, experts=0,
        load=0, load_bytes=4, num_sms=None, plan=0, kept=false, positions=None))]
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
        experts: u64,
        load: u64,
        load_bytes: u32,
        num_sms: Option<u32>,
        plan: u64,
        kept: bool,
        positions: Option<u32>,
    ) -> PyResult<()> {
        let launch_config = launch_config(stream, channel, num_sms, plan, kept, positions);
        let outputs = DispatchOutputs {
            tokens,
            scales,
            counts,
            offsets,
            rows,
            weights,
            experts,
            load,
            load_bytes,
        };
        // SAFETY: as in `dispatch_send`; the outputs were made for this call.
        self.wait(py, |moe| unsafe { moe.dispatch_recv(launch_config, &outputs) })
    }

    /// Waits for the counts in a round whose dispatch is in flight: tokens for each expert on this rank, each group's
    /// first position with the last one's end, and the positions needed if there are fewer.
    #[pyo3(signature = (stream, channel, timeout, *, plan=0))]
    fn counts(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        timeout: f64,
        plan: u64,
    ) -> PyResult<(Vec<u32>, Vec<u32>, u32)> {
        fork::check(py)?;
        let plan = PlanLocation { address: plan, kept: false };
        let launch_config = LaunchConfig { plan, ..LaunchConfig::new(Stream(stream), channel) };
        let timeout = Duration::try_from_secs_f64(timeout).unwrap_or(Duration::MAX);
        let counts = py.detach(|| self.run(|moe| moe.counts(launch_config, timeout)))?;
        Ok((counts.experts, counts.offsets, counts.needed))
    }

    /// Starts both dispatch halves.
    #[pyo3(signature = (stream, channel, tokens, scales, ids, weights, count, given, out_tokens,
        out_scales, out_counts, out_offsets, out_rows, out_weights, /, *, out_experts=0,
        load=0, load_bytes=4, num_sms=None, layer=0, plan=0, kept=false, positions=None))]
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
        out_experts: u64,
        load: u64,
        load_bytes: u32,
        num_sms: Option<u32>,
        layer: u32,
        plan: u64,
        kept: bool,
        positions: Option<u32>,
    ) -> PyResult<()> {
        let launch_config = launch_config(stream, channel, num_sms, plan, kept, positions);
        let inputs = DispatchInputs { tokens, scales, ids, weights, count, given, layer };
        let outputs = DispatchOutputs {
            tokens: out_tokens,
            scales: out_scales,
            counts: out_counts,
            offsets: out_offsets,
            rows: out_rows,
            weights: out_weights,
            experts: out_experts,
            load,
            load_bytes,
        };
        // SAFETY: as in the halves.
        self.wait(py, |moe| unsafe { moe.dispatch(launch_config, &inputs, &outputs) })
    }

    /// Starts the combine send half, or the release that takes its place.
    #[pyo3(signature = (stream, channel, outputs, release, *, num_sms=None, plan=0, kept=false, positions=None))]
    #[allow(clippy::too_many_arguments)]
    fn combine_send(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        outputs: u64,
        release: bool,
        num_sms: Option<u32>,
        plan: u64,
        kept: bool,
        positions: Option<u32>,
    ) -> PyResult<()> {
        let launch_config = launch_config(stream, channel, num_sms, plan, kept, positions);
        // SAFETY: as in `dispatch_send`.
        self.call(py, |moe| unsafe { moe.combine_send(launch_config, outputs, release) })
    }

    /// Starts the combine receive half.
    #[pyo3(signature = (stream, channel, combined, count, given, release, *, added=[0; 3], num_sms=None, plan=0, kept=false, positions=None))]
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
        added: [u64; 3],
        num_sms: Option<u32>,
        plan: u64,
        kept: bool,
        positions: Option<u32>,
    ) -> PyResult<()> {
        let launch_config = launch_config(stream, channel, num_sms, plan, kept, positions);
        let combined = CombineOutputs { combined, added, count, given };
        // SAFETY: as in `dispatch_recv`.
        self.wait(py, |moe| unsafe { moe.combine_recv(launch_config, &combined, release) })
    }

    /// Starts both combine halves.
    #[pyo3(signature = (stream, channel, outputs, combined, count, given, release, *, added=[0; 3],
        num_sms=None, plan=0, kept=false, positions=None))]
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
        added: [u64; 3],
        num_sms: Option<u32>,
        plan: u64,
        kept: bool,
        positions: Option<u32>,
    ) -> PyResult<()> {
        let launch_config = launch_config(stream, channel, num_sms, plan, kept, positions);
        let combined = CombineOutputs { combined, added, count, given };
        // SAFETY: as in the halves.
        self.wait(py, |moe| unsafe { moe.combine(launch_config, outputs, &combined, release) })
    }

    /// Raises the error that the device recorded, and clears it unless it ended the group.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, Moe::check)
    }

    /// Frees all memory; every rank calls this. No effect in a forked child.
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.moe.close(py, self.shared.as_ref(), timeout)
    }

    /// Ends it on this rank only. No effect in a forked child.
    fn abandon(&self, py: Python<'_>) {
        self.moe.abandon(py);
    }
}

/// A call's launch configuration: stream and channel, and the round's plan and positions.
pub(super) fn launch_config(
    stream: u64,
    channel: u32,
    num_sms: Option<u32>,
    plan: u64,
    kept: bool,
    positions: Option<u32>,
) -> LaunchConfig {
    let plan = PlanLocation { address: plan, kept };
    LaunchConfig { stream: Stream(stream), channel, num_sms, plan, positions }
}
