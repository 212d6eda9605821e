//! Dispatch and combine between GPUs as calls: each puts kernels on a stream, or runs their twin, and
//! returns.

use crate::device::areas::{DeviceArea, StateWord};
use crate::device::arguments::{DispatchInputs, DispatchOutputs};
use crate::device::given;
use crate::device::launch::Operation;
use crate::device::program::{Build, Call, Launcher};
use crate::device::shape::DeviceShape;
use crate::device::twin::Twin;
use crate::error::Error;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use weft_cuda::Stream;
use weft_gpu::domain::{Block, Domain, Reservation};

/// Expert-parallel all-to-all between the GPUs of one host: tokens to the ranks of their experts, results
/// back.
///
/// Every rank makes the same calls, in the same order on each channel. Calls do not wait: they put work
/// on a stream of the caller's, and what goes wrong there is raised by a later call or by
/// [`DeviceAllToAll::check`]. Only the CPU twin works at once, and its receive halves wait.
///
/// Every call first looks whether the group is alive. What a kernel recorded poisons the group, so that
/// all ranks raise; what the control plane hears of lost peers ends the waits of kernels.
///
/// Dropping it waits until the device is done, so that memory is never freed under a kernel. Peers may
/// then still write to this rank's part, which stays for as long as they need it.
pub struct DeviceAllToAll {
    shape: Arc<DeviceShape>,
    /// Whether a call was captured into a graph, which may be replayed at any time.
    captured: AtomicBool,
    /// `None` once closed.
    parts: Option<Parts>,
}

/// What kernels use: let go of once no kernel runs, in this order.
pub(super) struct Parts {
    pub backend: Backend,
    pub block: Block,
    /// Its entry in the account, for as long as it lives.
    pub _reservation: Option<Reservation>,
    pub domain: Arc<Domain>,
}

pub(super) enum Backend {
    Cuda(Box<Launcher>),
    Twin(Twin),
}

/// Where a call runs.
#[derive(Clone, Copy, Debug)]
pub struct Site {
    /// A stream of this rank's device; the twin has none.
    pub stream: Stream,
    /// The channel.
    pub channel: u32,
    /// Streaming multiprocessors that its launches may take, at most as many as the all-to-all was made with;
    /// `None` for as many.
    pub num_sms: Option<u32>,
}

impl Site {
    /// With as many multiprocessors as the all-to-all was made with.
    pub fn new(stream: Stream, channel: u32) -> Site {
        Site { stream, channel, num_sms: None }
    }
}

/// Rows that have landed, where they landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landed {
    /// The first.
    pub address: u64,
    /// Bytes from one to the next.
    pub stride: u64,
    /// How many there is room for: `max_tokens` from each source.
    pub rows: u32,
}

impl DeviceAllToAll {
    pub(super) fn new(shape: Arc<DeviceShape>, parts: Parts) -> DeviceAllToAll {
        DeviceAllToAll { shape, captured: AtomicBool::new(false), parts: Some(parts) }
    }

    /// What was agreed on.
    pub fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    /// The experts of this rank.
    pub fn experts(&self) -> Range<u32> {
        self.shape.placement().experts_of(self.shape.config().rank)
    }

    /// Streaming multiprocessors that a dispatch takes; 0 for the twin.
    pub fn num_sms(&self) -> u32 {
        match self.parts.as_ref().map(|parts| &parts.backend) {
            Some(Backend::Cuda(launcher)) => launcher.num_sms(),
            Some(Backend::Twin(_)) | None => 0,
        }
    }

    /// What it took to get the kernels; the twin has none.
    pub fn build(&self) -> Build {
        match self.parts.as_ref().map(|parts| &parts.backend) {
            Some(Backend::Cuda(launcher)) => launcher.build(),
            Some(Backend::Twin(_)) | None => Build::default(),
        }
    }

    /// Whether calls run at once on the calling thread, where receive halves wait.
    pub fn is_twin(&self) -> bool {
        matches!(self.parts.as_ref().map(|parts| &parts.backend), Some(Backend::Twin(_)))
    }

    /// The rows of `channel`, as the indexed layout names them: that of source `s` in slot `j` is number
    /// `s * max_tokens + j`.
    ///
    /// # Errors
    /// [`Error::NoChannel`].
    pub fn landed(&self, channel: u32) -> Result<Landed, Error> {
        let parts = self.begin(channel)?;
        let config = self.shape.config();
        Ok(Landed {
            address: parts.block.own() + self.shape.at(channel, DeviceArea::Rows),
            stride: self.shape.areas().row_stride,
            rows: config.ranks * config.max_tokens,
        })
    }

    /// Tokens leave for the ranks of their experts.
    ///
    /// # Errors
    /// Why the group is dead, if it is; [`Error::TooManyTokens`], [`Error::NoChannel`],
    /// [`Error::NoAddress`] and [`Error::Misaligned`]; CUDA's.
    ///
    /// # Safety
    /// The arrays are where `inputs` says, on this rank's device (for the twin, on the CPU), as long as it
    /// says, and stay so until the call has run on the site's stream, which is one of that device.
    pub unsafe fn dispatch_send(&self, site: Site, inputs: &DispatchInputs) -> Result<(), Error> {
        let parts = self.begin_on(site)?;
        let Site { channel, .. } = site;
        parts.domain.alarm().all_are_there()?;
        self.shape.check_inputs(inputs)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let call = Call { channel, inputs: *inputs, ..Call::default() };
                // SAFETY: the caller's promise; `parts` live until the device is done.
                unsafe { launcher.launch(Operation::DispatchSend, site, &call) }
            }
            Backend::Twin(twin) => {
                // SAFETY: the caller's promise.
                unsafe { twin.dispatch_send(channel, inputs) };
                Ok(())
            }
        }
    }

    /// Waits, on the device, for the tokens of all ranks, and lays them out.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::dispatch_send`].
    ///
    /// # Safety
    /// As [`DeviceAllToAll::dispatch_send`], and nobody else touches the arrays meanwhile.
    pub unsafe fn dispatch_recv(&self, site: Site, outputs: &DispatchOutputs) -> Result<(), Error> {
        let parts = self.begin_on(site)?;
        let Site { channel, .. } = site;
        self.shape.check_outputs(outputs)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let call = Call { channel, received: *outputs, ..Call::default() };
                // SAFETY: as in `dispatch_send`.
                unsafe { launcher.launch(Operation::DispatchRecv, site, &call) }
            }
            Backend::Twin(twin) => {
                // SAFETY: the caller's promise.
                unsafe { twin.dispatch_recv(channel, outputs) };
                Ok(())
            }
        }
    }

    /// Both halves of dispatch, in one launch.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::dispatch_send`].
    ///
    /// # Safety
    /// That of the halves.
    pub unsafe fn dispatch(
        &self,
        site: Site,
        inputs: &DispatchInputs,
        outputs: &DispatchOutputs,
    ) -> Result<(), Error> {
        let parts = self.begin_on(site)?;
        let Site { channel, .. } = site;
        parts.domain.alarm().all_are_there()?;
        self.shape.check_inputs(inputs)?;
        self.shape.check_outputs(outputs)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let (inputs, received) = (*inputs, *outputs);
                let call = Call { channel, inputs, received, ..Call::default() };
                // SAFETY: as in `dispatch_send`.
                unsafe { launcher.launch(Operation::Dispatch, site, &call) }
            }
            Backend::Twin(twin) => {
                // SAFETY: the caller's promise.
                unsafe { twin.dispatch(channel, inputs, outputs) };
                Ok(())
            }
        }
    }

    /// Answers leave: `outputs` has a row in the combine type for every position. With `release` the
    /// rows are only given back, and `outputs` is not read.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::dispatch_send`].
    ///
    /// # Safety
    /// As [`DeviceAllToAll::dispatch_send`].
    pub unsafe fn combine_send(
        &self,
        site: Site,
        outputs: u64,
        release: bool,
    ) -> Result<(), Error> {
        let parts = self.begin_on(site)?;
        let Site { channel, .. } = site;
        given::aligned("outputs", outputs)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let call = Call { channel, outputs, release, ..Call::default() };
                // SAFETY: as in `dispatch_send`.
                unsafe { launcher.launch(Operation::CombineSend, site, &call) }
            }
            Backend::Twin(twin) => {
                // SAFETY: the caller's promise.
                unsafe { twin.combine_send(channel, outputs, release) };
                Ok(())
            }
        }
    }

    /// Waits, on the device, for the answers, and adds them up into `combined`: `[given, hidden]` in the
    /// output type. `count` and `given` are those of dispatch.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::dispatch_send`].
    ///
    /// # Safety
    /// As [`DeviceAllToAll::dispatch_recv`].
    pub unsafe fn combine_recv(
        &self,
        site: Site,
        combined: u64,
        count: u64,
        given: u32,
        release: bool,
    ) -> Result<(), Error> {
        let parts = self.begin_on(site)?;
        let Site { channel, .. } = site;
        self.shape.check_combined(combined, given, release)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let inputs = DispatchInputs { count, given, ..DispatchInputs::default() };
                let call = Call { channel, inputs, combined, release, ..Call::default() };
                // SAFETY: as in `dispatch_send`.
                unsafe { launcher.launch(Operation::CombineRecv, site, &call) }
            }
            Backend::Twin(twin) => {
                // SAFETY: the caller's promise.
                unsafe { twin.combine_recv(channel, combined, count, given, release) };
                Ok(())
            }
        }
    }

    /// Both halves of combine, in one launch.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::dispatch_send`].
    ///
    /// # Safety
    /// That of the halves.
    pub unsafe fn combine(
        &self,
        site: Site,
        outputs: u64,
        combined: u64,
        count: u64,
        given: u32,
        release: bool,
    ) -> Result<(), Error> {
        let parts = self.begin_on(site)?;
        let Site { channel, .. } = site;
        given::aligned("outputs", outputs)?;
        self.shape.check_combined(combined, given, release)?;
        match &parts.backend {
            Backend::Cuda(launcher) => {
                let inputs = DispatchInputs { count, given, ..DispatchInputs::default() };
                let call = Call { channel, inputs, outputs, combined, release, ..Call::default() };
                // SAFETY: as in `dispatch_send`.
                unsafe { launcher.launch(Operation::Combine, site, &call) }
            }
            Backend::Twin(twin) => {
                // SAFETY: the caller's promise.
                unsafe { twin.combine(channel, outputs, combined, count, given, release) };
                Ok(())
            }
        }
    }

    /// What the device has recorded so far: why the group is dead, or what was wrong with a batch, which
    /// is raised once. It does not wait: to know that a batch went well, synchronise before.
    ///
    /// # Errors
    /// [`Error::Gpu`] with the record, or [`weft_fabric::Error::Poisoned`].
    pub fn check(&self) -> Result<(), Error> {
        Ok(self.parts()?.domain.check()?)
    }

    /// Waits until this rank's device has done all that was asked of it, by whomever.
    ///
    /// # Errors
    /// CUDA's, of whatever failed there.
    pub fn settle(&self) -> Result<(), Error> {
        match self.parts.as_ref().map(|parts| &parts.backend) {
            Some(Backend::Cuda(launcher)) => launcher.settle(),
            Some(Backend::Twin(_)) | None => Ok(()),
        }
    }

    /// From here on the memory of this all-to-all is used for nothing else while its domain lives: a graph
    /// that was captured may be replayed. Calls that are captured on a GPU do this themselves.
    pub fn keep(&self) {
        self.captured.store(true, Ordering::Relaxed);
    }

    /// Ends it on this rank: no kernel uses its memory from then on. Returns its domain, if it was not ended.
    pub(super) fn end(&mut self) -> Option<Arc<Domain>> {
        let settled = self.settle();
        let Parts { backend, block, _reservation, domain } = self.parts.take()?;
        let marked = settled.and_then(|()| self.mark_closed(&domain, &block));
        if let Err(error) = marked {
            log::warn!("memory of an all-to-all stays allocated: {error}");
            block.keep();
            std::mem::forget(backend);
        } else if self.captured.load(Ordering::Relaxed) {
            block.keep();
        }
        Some(domain)
    }

    /// Has kernels of graphs that are replayed from now on do nothing.
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

    fn parts(&self) -> Result<&Parts, Error> {
        self.parts.as_ref().ok_or(Error::Fabric(weft_control::Error::Closed.into()))
    }

    /// As [`DeviceAllToAll::begin`], of a call that puts kernels on a stream.
    #[inline]
    fn begin_on(&self, site: Site) -> Result<&Parts, Error> {
        let parts = self.begin(site.channel)?;
        if site.num_sms == Some(0) {
            return Err(Error::Zero { field: "num_sms" });
        }
        if let Backend::Cuda(launcher) = &parts.backend
            && !self.captured.load(Ordering::Relaxed)
            && launcher.may_be_captured(site.stream)
        {
            self.keep();
        }
        Ok(parts)
    }

    /// Looks at what every call looks at.
    #[inline]
    fn begin(&self, channel: u32) -> Result<&Parts, Error> {
        let parts = self.parts()?;
        parts.domain.look()?;
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
