//! Dispatch and combine between GPUs as calls: each launches kernels on a stream, or runs the twin.

use crate::device::abi::arguments::{
    CombineOutputs, DeviceCounts, DispatchInputs, DispatchOutputs,
};
use crate::device::calls::argument_checks;
use crate::device::launch::config::LaunchConfig;
use crate::device::launch::grid::Operation;
use crate::device::launch::launcher::{CallArguments, Launcher};
use crate::device::launch::program::BuildInfo;
use crate::device::options::types::DeviceLayout;
use crate::device::shape::DeviceShape;
use crate::device::shape::channel_layout::{DeviceArea, StateWord};
use crate::device::shape::replica_table::LayerMaps;
use crate::device::twin::{Twin, TwinLaunch};
use crate::error::Error;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weft_cuda::Stream;
use weft_gpu::domain::{Block, Domain, Reservation};

/// Expert-parallel all-to-all between GPUs on one host: sends tokens to their experts' ranks, and returns
/// results.
///
/// Every rank makes the same calls, in the same order on each channel. Calls do not wait: they launch work on
/// the caller's stream, and a later call or [`DeviceAllToAll::check`] raises errors from that work. Only the
/// CPU twin runs within the call, and the receive halves wait.
///
/// Every call first checks that the group is alive. A fatal kernel record poisons the group, so that all
/// ranks raise; if the control plane detects a peer's loss, it ends the kernels' waits.
///
/// A drop waits until the device is idle, so that memory is never freed under a kernel. Peers may still write
/// to this rank's block afterwards, which stays as long as they need it.
pub struct DeviceAllToAll {
    shape: Arc<DeviceShape>,
    /// True if a call was captured into a graph, which may be replayed at any time.
    captured: AtomicBool,
    pub(crate) maps: Mutex<LayerMaps>,
    /// `None` once closed.
    pub(crate) parts: Option<DeviceParts>,
}

/// Kernel resources, released in this order once no kernel runs.
pub(crate) struct DeviceParts {
    pub backend: Backend,
    pub block: Block,
    /// Entry in the residency account.
    pub _reservation: Option<Reservation>,
    pub domain: Arc<Domain>,
}

pub(crate) enum Backend {
    Cuda(Box<Launcher>),
    Twin(Twin),
}

/// Received rows, in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedRows {
    /// First row's address.
    pub address: u64,
    /// Row stride in bytes.
    pub stride: u64,
    /// Row count: `max_tokens` from each source.
    pub rows: u32,
}

impl DeviceAllToAll {
    pub(crate) fn new(shape: Arc<DeviceShape>, parts: DeviceParts) -> DeviceAllToAll {
        let maps = Mutex::new(LayerMaps::new(&shape.config().maps));
        DeviceAllToAll { shape, captured: AtomicBool::new(false), maps, parts: Some(parts) }
    }

    /// The agreed shape.
    pub fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    /// Experts on this rank.
    pub fn experts(&self) -> Range<u32> {
        self.shape.placement().experts_of(self.shape.config().rank)
    }

    /// SMs for a dispatch; 0 for the twin.
    pub fn num_sms(&self) -> u32 {
        match self.parts.as_ref().map(|parts| &parts.backend) {
            Some(Backend::Cuda(launcher)) => launcher.num_sms(),
            Some(Backend::Twin(_)) | None => 0,
        }
    }

    /// Kernel compile time; the default for the twin.
    pub fn build(&self) -> BuildInfo {
        match self.parts.as_ref().map(|parts| &parts.backend) {
            Some(Backend::Cuda(launcher)) => launcher.build(),
            Some(Backend::Twin(_)) | None => BuildInfo::default(),
        }
    }

    /// True for the twin: calls run on the calling thread, and receive halves wait.
    pub fn is_twin(&self) -> bool {
        matches!(self.parts.as_ref().map(|parts| &parts.backend), Some(Backend::Twin(_)))
    }

    /// True if calls on a stream are captured into a graph; `None` if the stream's state is unavailable, as
    /// for the default stream during another capture. Always false for the twin.
    ///
    /// # Errors
    /// [`weft_control::Error::Closed`].
    #[inline]
    pub fn is_captured(&self, stream: Stream) -> Result<Option<bool>, Error> {
        Ok(match &self.parts()?.backend {
            Backend::Cuda(launcher) => launcher.is_captured(stream),
            Backend::Twin(_) => Some(false),
        })
    }

    /// Received rows on `channel`, as the indexed layout numbers them: slot `j` from source `s` is row
    /// `s * max_tokens + j`.
    ///
    /// # Errors
    /// [`Error::NoChannel`].
    pub fn received_rows(&self, channel: u32) -> Result<ReceivedRows, Error> {
        let parts = self.begin(channel)?;
        let config = self.shape.config();
        Ok(ReceivedRows {
            address: parts.block.own() + self.shape.at(channel, DeviceArea::Rows),
            stride: self.shape.channel_layout().row_stride,
            rows: config.ranks * config.max_tokens,
        })
    }

    /// Dispatch send: sends tokens to their experts' ranks.
    ///
    /// # Errors
    /// The cause if the group has failed; [`Error::TooManyTokens`], [`Error::NoChannel`],
    /// [`Error::NoAddress`] and [`Error::Misaligned`]; CUDA errors.
    ///
    /// # Safety
    /// The `inputs` arrays are on this rank's device (for the twin, on the CPU) and have the lengths that
    /// follow from it, until the call has run on its stream, which belongs to that device. The same holds for
    /// the plan until the round has ended; a kept plan was made by a round in an all-to-all with this shape.
    pub unsafe fn dispatch_send(
        &self,
        launch_config: LaunchConfig,
        inputs: &DispatchInputs,
    ) -> Result<(), Error> {
        let parts = self.begin_on(launch_config)?;
        parts.domain.failures().check_peers_present()?;
        self.shape.check_plan(launch_config.plan)?;
        self.shape.check_inputs(inputs, launch_config.plan)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let map = self.map_address(parts, inputs.layer);
                let call = CallArguments { inputs: *inputs, map, ..CallArguments::default() };
                // SAFETY: the caller's contract; `parts` live until the device is idle.
                unsafe { launcher.launch(Operation::DispatchSend, launch_config, &call) }
            }
            Backend::Twin(twin) => {
                let at = TwinLaunch::of(launch_config, &self.shape);
                // SAFETY: the caller's contract.
                unsafe { twin.dispatch_send(at, inputs) };
                Ok(())
            }
        }
    }

    /// Dispatch receive: waits, on the device, for all ranks' tokens, and lays them out.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::dispatch_send`].
    ///
    /// # Safety
    /// As [`DeviceAllToAll::dispatch_send`], with exclusive access to the arrays.
    pub unsafe fn dispatch_recv(
        &self,
        launch_config: LaunchConfig,
        outputs: &DispatchOutputs,
    ) -> Result<(), Error> {
        let parts = self.begin_on(launch_config)?;
        self.shape.check_plan(launch_config.plan)?;
        self.shape.check_outputs(outputs, launch_config.plan)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let call = CallArguments { received: *outputs, ..CallArguments::default() };
                // SAFETY: as in `dispatch_send`.
                unsafe { launcher.launch(Operation::DispatchRecv, launch_config, &call) }
            }
            Backend::Twin(twin) => {
                let at = TwinLaunch::of(launch_config, &self.shape);
                // SAFETY: the caller's contract.
                unsafe { twin.dispatch_recv(at, outputs) };
                Ok(())
            }
        }
    }

    /// Waits on the host, at most `timeout`, for the counts in a round whose tokens are in flight, so that
    /// arrays can be allocated by them. [`DeviceAllToAll::dispatch_recv`] follows.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::dispatch_send`]; [`Error::Captured`], [`Error::CountsLate`], and
    /// [`Error::NoCounts`] if no tokens are in flight.
    pub fn counts(
        &self,
        launch_config: LaunchConfig,
        timeout: Duration,
    ) -> Result<DeviceCounts, Error> {
        let parts = self.begin_on(launch_config)?;
        self.shape.check_plan(launch_config.plan)?;
        if self.shape.config().layout == DeviceLayout::Dense {
            return Err(argument_checks::NOT_DENSE);
        }
        let counts = match &parts.backend {
            Backend::Cuda(launcher) => {
                if launcher.is_captured(launch_config.stream).unwrap_or(true) {
                    return Err(Error::Captured { what: "counts on the host" });
                }
                launcher.counts(launch_config, timeout, || Ok(parts.domain.check_fatal()?))?
            }
            Backend::Twin(twin) => twin.counts(TwinLaunch::of(launch_config, &self.shape)),
        };
        parts.domain.check_fatal()?;
        counts.ok_or(Error::NoCounts { channel: launch_config.channel })
    }

    /// Both dispatch halves, in one launch.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::dispatch_send`].
    ///
    /// # Safety
    /// As for the halves.
    pub unsafe fn dispatch(
        &self,
        launch_config: LaunchConfig,
        inputs: &DispatchInputs,
        outputs: &DispatchOutputs,
    ) -> Result<(), Error> {
        let parts = self.begin_on(launch_config)?;
        parts.domain.failures().check_peers_present()?;
        self.shape.check_plan(launch_config.plan)?;
        self.shape.check_inputs(inputs, launch_config.plan)?;
        self.shape.check_outputs(outputs, launch_config.plan)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let (inputs, received) = (*inputs, *outputs);
                let map = self.map_address(parts, inputs.layer);
                let call = CallArguments { inputs, received, map, ..CallArguments::default() };
                // SAFETY: as in `dispatch_send`.
                unsafe { launcher.launch(Operation::Dispatch, launch_config, &call) }
            }
            Backend::Twin(twin) => {
                let at = TwinLaunch::of(launch_config, &self.shape);
                // SAFETY: the caller's contract.
                unsafe { twin.dispatch(at, inputs, outputs) };
                Ok(())
            }
        }
    }

    /// Combine send: sends the replies. `outputs` has a row in the combine type for every position. With
    /// `release` the rows are only released, and `outputs` is not read.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::dispatch_send`].
    ///
    /// # Safety
    /// As [`DeviceAllToAll::dispatch_send`].
    pub unsafe fn combine_send(
        &self,
        launch_config: LaunchConfig,
        outputs: u64,
        release: bool,
    ) -> Result<(), Error> {
        let parts = self.begin_on(launch_config)?;
        self.shape.check_plan(launch_config.plan)?;
        argument_checks::aligned("outputs", outputs)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let call = CallArguments { outputs, release, ..CallArguments::default() };
                // SAFETY: as in `dispatch_send`.
                unsafe { launcher.launch(Operation::CombineSend, launch_config, &call) }
            }
            Backend::Twin(twin) => {
                let at = TwinLaunch::of(launch_config, &self.shape);
                // SAFETY: the caller's contract.
                unsafe { twin.combine_send(at, outputs, release) };
                Ok(())
            }
        }
    }

    /// Combine receive: waits, on the device, for the replies, and sums them. `count` and `given` are as in
    /// dispatch.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::dispatch_send`].
    ///
    /// # Safety
    /// As [`DeviceAllToAll::dispatch_recv`].
    pub unsafe fn combine_recv(
        &self,
        launch_config: LaunchConfig,
        combined: &CombineOutputs,
        release: bool,
    ) -> Result<(), Error> {
        let parts = self.begin_on(launch_config)?;
        self.shape.check_plan(launch_config.plan)?;
        self.shape.check_combined(combined, release)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let CombineOutputs { count, given, .. } = *combined;
                let inputs = DispatchInputs { count, given, ..DispatchInputs::default() };
                let call = CallArguments {
                    inputs,
                    combined: *combined,
                    release,
                    ..CallArguments::default()
                };
                // SAFETY: as in `dispatch_send`.
                unsafe { launcher.launch(Operation::CombineRecv, launch_config, &call) }
            }
            Backend::Twin(twin) => {
                let at = TwinLaunch::of(launch_config, &self.shape);
                // SAFETY: the caller's contract.
                unsafe { twin.combine_recv(at, combined, release) };
                Ok(())
            }
        }
    }

    /// Both combine halves, in one launch.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::dispatch_send`].
    ///
    /// # Safety
    /// As for the halves.
    pub unsafe fn combine(
        &self,
        launch_config: LaunchConfig,
        outputs: u64,
        combined: &CombineOutputs,
        release: bool,
    ) -> Result<(), Error> {
        let parts = self.begin_on(launch_config)?;
        self.shape.check_plan(launch_config.plan)?;
        argument_checks::aligned("outputs", outputs)?;
        self.shape.check_combined(combined, release)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let CombineOutputs { count, given, .. } = *combined;
                let inputs = DispatchInputs { count, given, ..DispatchInputs::default() };
                let combined = *combined;
                let call = CallArguments {
                    inputs,
                    outputs,
                    combined,
                    release,
                    ..CallArguments::default()
                };
                // SAFETY: as in `dispatch_send`.
                unsafe { launcher.launch(Operation::Combine, launch_config, &call) }
            }
            Backend::Twin(twin) => {
                let at = TwinLaunch::of(launch_config, &self.shape);
                // SAFETY: the caller's contract.
                unsafe { twin.combine(at, outputs, combined, release) };
                Ok(())
            }
        }
    }

    /// Reports device records so far: the cause if the group has failed, or a notice about a batch, which is
    /// raised once. It does not wait: synchronise first to cover a batch.
    ///
    /// # Errors
    /// [`Error::Gpu`] with the record, or [`weft_fabric::Error::Poisoned`].
    pub fn check(&self) -> Result<(), Error> {
        Ok(self.parts()?.domain.check()?)
    }

    /// Waits until this rank's device is idle.
    ///
    /// # Errors
    /// CUDA errors from any failed work.
    pub fn settle(&self) -> Result<(), Error> {
        match self.parts.as_ref().map(|parts| &parts.backend) {
            Some(Backend::Cuda(launcher)) => launcher.settle(),
            Some(Backend::Twin(_)) | None => Ok(()),
        }
    }

    /// Keeps this all-to-all's memory for as long as the domain lives, since a captured graph may be
    /// replayed. Captured calls on a GPU do this themselves.
    pub fn keep(&self) {
        self.captured.store(true, Ordering::Relaxed);
    }

    /// Ends it on this rank: no kernel uses the memory afterwards. Returns the domain, unless it was ended
    /// before.
    pub(crate) fn end(&mut self) -> Option<Arc<Domain>> {
        let settled = self.settle();
        let DeviceParts { backend, block, _reservation, domain } = self.parts.take()?;
        let marked = settled.and_then(|()| self.mark_closed(&domain, &block));
        if let Err(error) = marked {
            log::warn!("all-to-all memory stays allocated: {error}");
            block.keep();
            std::mem::forget(backend);
        } else if self.captured.load(Ordering::Relaxed) {
            block.keep();
        }
        Some(domain)
    }

    /// Makes kernels in replayed graphs return at once.
    fn mark_closed(&self, domain: &Domain, block: &Block) -> Result<(), Error> {
        if self.captured.load(Ordering::Relaxed) {
            for channel in 0..self.shape.config().channels {
                let state = self.shape.at(channel, DeviceArea::State);
                let at = state + 4 * StateWord::Closed as u64;
                domain.write_block(block, at, &1u32.to_ne_bytes())?;
            }
        }
        Ok(())
    }

    /// Address of a layer's replica table; 0 without maps.
    #[inline]
    fn map_address(&self, parts: &DeviceParts, layer: u32) -> u64 {
        self.shape.map_at(layer).map_or(0, |at| parts.block.own() + at)
    }

    pub(crate) fn parts(&self) -> Result<&DeviceParts, Error> {
        self.parts.as_ref().ok_or(Error::Fabric(weft_control::Error::Closed.into()))
    }

    /// [`DeviceAllToAll::begin`] for a call that launches kernels on a stream.
    #[inline]
    fn begin_on(&self, launch_config: LaunchConfig) -> Result<&DeviceParts, Error> {
        let parts = self.begin(launch_config.channel)?;
        if launch_config.num_sms == Some(0) {
            return Err(Error::Zero { field: "num_sms" });
        }
        if let Backend::Cuda(launcher) = &parts.backend
            && !self.captured.load(Ordering::Relaxed)
            && launcher.is_captured(launch_config.stream).unwrap_or(true)
        {
            self.keep();
        }
        Ok(parts)
    }

    /// Checks common to all calls.
    #[inline]
    fn begin(&self, channel: u32) -> Result<&DeviceParts, Error> {
        let parts = self.parts()?;
        parts.domain.check_fatal()?;
        let channels = self.shape.config().channels;
        if channel >= channels {
            return Err(Error::NoChannel { channel, channels });
        }
        Ok(parts)
    }
}

impl Drop for DeviceAllToAll {
    fn drop(&mut self) {
        drop(self.end());
    }
}
