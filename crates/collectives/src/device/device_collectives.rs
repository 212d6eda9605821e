//! Collectives between the GPUs on one host: calls that launch a kernel on a stream, or run its twin.

use super::arguments::{ArgumentBlock, TensorsOfRanks};
use super::call::DeviceCall;
use super::call_board::CallBoard;
use super::config::DeviceConfig;
use super::construction::{Offer, Prepared, most_blocks};
use super::error::DeviceError;
use super::layout::{Layout, UNIT};
use super::parts::{Backend, Parts};
use super::plan::{DeviceAlgorithm, Kernel, LaunchPlan, Transport};
use super::program::Programs;
use super::transfers::{Transfer, TransferBlock, TransferPlan};
use super::twin::TwinCall;
use crate::reduction::{Element, Reduction};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use weft_cuda::Stream;
use weft_fabric::{Communicator, Time};
use weft_gpu::MemoryLocation;
use weft_gpu::domain::{ALIGNMENT, Domain, MemoryNumber, RegisteredPlaces, SymmetricPlace};

/// Collectives between the GPUs on one host.
///
/// Every rank makes the same calls in the same order. A call launches one kernel on a caller's stream (by copy engines,
/// two kernels and copies between them) and returns; it may be captured. A later call or [`DeviceCollectives::check`]
/// reports device errors. Only the twin runs within the call, and waits.
///
/// Kernels from two calls must not overlap on a rank: the caller orders the streams.
pub struct DeviceCollectives {
    layout: Layout,
    rank: u32,
    /// True if a call was captured into a graph, which may be replayed at any time.
    captured: AtomicBool,
    /// True if no communicator keeps the domain.
    local: bool,
    /// `None` once closed.
    parts: Option<Parts>,
}

impl DeviceCollectives {
    /// Creates collectives in the heap of the domain that `domain` returns. Every rank calls this with
    /// the same configuration.
    ///
    /// # Errors
    /// [`DeviceError::Zero`], [`DeviceError::TooLarge`]; [`weft_gpu::Error::NotResident`] if the launches do not fit on
    /// the GPU together with the other concurrent ones; [`DeviceError::Disagreement`]; CUDA, heap and fabric errors. A
    /// rank that fails notifies the others.
    pub fn over(
        communicator: &Communicator,
        config: &DeviceConfig,
        deadline: Time,
        domain: impl FnOnce() -> weft_gpu::Result<Arc<Domain>>,
    ) -> Result<DeviceCollectives, DeviceError> {
        let domain = domain()?;
        let control = communicator.control();
        let limit = weft_gpu::heap::agree(control, most_blocks(config, &domain), deadline)?;
        let copies = vec![Offer::new(config, limit).encode(); communicator.world_size() as usize];
        let blocks = Offer::new(config, limit).agree(&communicator.exchange(&copies, deadline)?)?;
        let prepared = Prepared::new(config, &domain, blocks);
        let prepared = weft_gpu::heap::agree(control, prepared, deadline)?;
        let bytes = prepared.layout.bytes;
        let block = domain.allocate(communicator, bytes, ALIGNMENT, deadline)?;
        let board = CallBoard::create(communicator, deadline);
        Ok(DeviceCollectives::new(prepared.finish(block, board), false))
    }

    /// Collectives for all ranks in a group in this process, by rank.
    ///
    /// # Errors
    /// As [`DeviceCollectives::over`].
    pub fn local_group(configs: &[DeviceConfig]) -> Result<Vec<DeviceCollectives>, DeviceError> {
        let locations: Vec<MemoryLocation> = configs.iter().map(|config| config.location).collect();
        let domains = Domain::local_group(&locations)?;
        let limits = configs.iter().zip(&domains);
        let limits = limits.map(|(config, domain)| most_blocks(config, domain));
        let blocks = limits.collect::<Result<Vec<_>, _>>()?.into_iter().min().unwrap_or(1);
        let prepared = configs.iter().zip(&domains);
        let prepared = prepared.map(|(config, domain)| Prepared::new(config, domain, blocks));
        let prepared = prepared.collect::<Result<Vec<_>, _>>()?;
        let bytes = prepared.first().map_or(0, |rank| rank.layout.bytes);
        let blocks = Domain::allocate_local(&domains, bytes, ALIGNMENT)?;
        let parts = blocks.into_iter().zip(CallBoard::local_group(configs.len()));
        let ranks = prepared.into_iter().zip(parts);
        Ok(ranks
            .map(|(rank, (block, board))| DeviceCollectives::new(rank.finish(block, board), true))
            .collect())
    }

    fn new((layout, parts): (Layout, Parts), local: bool) -> DeviceCollectives {
        let (rank, captured) = (parts.domain.rank(), AtomicBool::new(false));
        DeviceCollectives { layout, rank, captured, local, parts: Some(parts) }
    }

    /// Memory sizes.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// True for the twin: calls run on the calling thread, and wait.
    pub fn is_twin(&self) -> bool {
        matches!(self.parts.as_ref().map(|parts| &parts.backend), Some(Backend::Twin(_)))
    }

    /// Compiles and loads a reduction's kernels. Otherwise the first call does.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`]; CUDA's.
    pub fn prepare(&self, reduction: Reduction, element: Element) -> Result<(), DeviceError> {
        supported(reduction, element)?;
        match &self.parts()?.backend {
            Backend::Cuda(programs) => programs.prepare((reduction, element)),
            Backend::Twin(_) => Ok(()),
        }
    }

    /// Starts a call on the stream that it names.
    ///
    /// # Errors
    /// The cause if the group has failed; [`DeviceError::NoRank`], [`DeviceError::Parts`], [`DeviceError::TooLarge`],
    /// [`DeviceError::Zero`], [`DeviceError::Unsupported`], [`DeviceError::Algorithm`], [`DeviceError::NotDirect`],
    /// [`DeviceError::NotByCopyEngine`], [`DeviceError::Misaligned`]; CUDA errors.
    ///
    /// # Safety
    /// `input` and `output` are addresses on this rank's device (for the twin, on the CPU), multiples of the element
    /// length, with the bytes that follow from the operation (see [`DeviceOperation`]), until the call has run on its
    /// stream, which is a stream on that device; only this call accesses the output. They are disjoint, or the output
    /// is the input part, or the other way around, that the operation copies or reduces to itself. If a tensor that
    /// peers access in a direct call (see [`DeviceAlgorithm::Direct`]), or in a copy-engine call, is in the domain's
    /// heap or in memory that the communicator has registered, it is there at all ranks, at the same place; registered
    /// memory stays registered until the call has run.
    pub unsafe fn run(&self, call: &DeviceCall) -> Result<(), DeviceError> {
        let parts = self.parts()?;
        parts.domain.check_fatal().map_err(|error| parts.failed(error))?;
        parts.domain.failures().check_peers_present()?;
        let arithmetic = call.operation.reduces().then_some((call.reduction, call.element));
        if let Some((reduction, element)) = arithmetic {
            supported(reduction, element)?;
        }
        let element_bytes = call.element.bytes() as u64;
        // Registrations end after the launch, or after a twin's call.
        let registered = parts.domain.registrations().enter();
        let places = self.symmetric_places(&parts.domain, &registered, call)?;
        let (layout, symmetric) = (&self.layout, places.is_some());
        let (rank, options) = (self.rank, call.options);
        let plan =
            LaunchPlan::new(&call.operation, element_bytes, rank, layout, options, symmetric)?;
        let places = places.filter(|_| plan.kernel.transport() == Transport::Direct);
        let tensors = places.map(|(input, output)| {
            let digest = call.digest(&input, &output);
            TensorsOfRanks { inputs: input.addresses, outputs: output.addresses, digest }
        });
        if let Some(board) = &parts.board {
            board.write(&call.operation, call.element);
        }
        let divisor = if call.average { self.layout.ranks } else { 0 };
        match &parts.backend {
            Backend::Cuda(programs) => {
                self.note_capture(programs, call.stream);
                let watch = parts.domain.failures().watch();
                let block = ArgumentBlock {
                    table: parts.domain.table(),
                    record: watch.record_address(),
                    abort: watch.abort_address(),
                    input: call.input,
                    output: call.output,
                    rank: self.rank,
                    element_bytes: element_bytes as u32,
                    aligned: plan.is_aligned(call.input, call.output).into(),
                    same_for_all: plan.is_same_for_all(self.rank).into(),
                    units_per_block: plan.units_per_block,
                    chunk_bytes: plan.chunk_bytes,
                    divisor,
                    digest: tensors.as_ref().map_or(0, |tensors| tensors.digest),
                };
                let addresses = (parts.peers.as_slice(), tensors.as_ref());
                // SAFETY: the caller's contract; `parts` live until the device is idle.
                let launched =
                    unsafe { programs.launch(&plan, addresses, &block, arithmetic, call.stream) };
                // The entry may be launched without the exit: peers would take the next call for it.
                if plan.kernel == Kernel::CopyEntry
                    && launched.is_err()
                    && !programs.is_captured(call.stream)
                {
                    watch.abort();
                }
                launched
            }
            Backend::Twin(twin) => {
                let (input, output) = (call.input, call.output);
                let reduction = arithmetic;
                let (plan, tensors) = (&plan, tensors.as_ref());
                let call =
                    TwinCall { plan, tensors, input, output, element_bytes, reduction, divisor };
                // SAFETY: the caller's contract.
                unsafe { twin.run(&call) };
                parts.domain.check_fatal().map_err(|error| parts.failed(error))
            }
        }
    }

    /// Starts sends and receives on a stream, all at the same time; no work if there are none. A message matches its
    /// other end by the message order for that pair and direction; other ranks take no part. It lies in the receiver's
    /// rings until the receiver calls: a longer one ends once the receiver consumes it.
    ///
    /// # Errors
    /// The cause if the group has failed; [`DeviceError::NoRank`], [`DeviceError::ToItself`],
    /// [`DeviceError::TooLarge`]; CUDA errors.
    ///
    /// # Safety
    /// Addresses point to tensors on this rank's device (for the twin, on the CPU), until the call has run on its
    /// stream, which is a stream on that device; only one transfer accesses each receive tensor.
    pub unsafe fn run_transfers(
        &self,
        stream: Stream,
        batch: &[Transfer],
    ) -> Result<(), DeviceError> {
        let parts = self.parts()?;
        parts.domain.check_fatal().map_err(|error| parts.failed(error))?;
        parts.domain.failures().check_peers_present()?;
        if batch.is_empty() {
            return Ok(());
        }
        let plan = TransferPlan::new(batch, self.rank, &self.layout)?;
        if let Some(board) = &parts.board {
            board.write_transfers(batch);
        }
        match &parts.backend {
            Backend::Cuda(programs) => {
                self.note_capture(programs, stream);
                let watch = parts.domain.failures().watch();
                let block = TransferBlock {
                    table: parts.domain.table(),
                    record: watch.record_address(),
                    abort: watch.abort_address(),
                    rank: self.rank,
                    count: batch.len() as u32,
                };
                // SAFETY: the caller's contract; `parts` live until the device is idle.
                unsafe { programs.launch_transfers(&plan, &parts.peers, &block, stream) }
            }
            Backend::Twin(twin) => {
                // SAFETY: the caller's contract.
                unsafe { twin.run_transfers(&plan) };
                parts.domain.check_fatal().map_err(|error| parts.failed(error))
            }
        }
    }

    /// Notes that a call is captured.
    fn note_capture(&self, programs: &Programs, stream: Stream) {
        if !self.captured.load(Ordering::Relaxed) && programs.is_captured(stream) {
            self.captured.store(true, Ordering::Relaxed);
        }
    }

    /// The domain, whose heap holds the tensors for direct calls.
    ///
    /// # Errors
    /// [`DeviceError::Fabric`] once it is closed.
    pub fn domain(&self) -> Result<Arc<Domain>, DeviceError> {
        Ok(self.parts()?.domain.clone())
    }

    /// Input and output places, if the tensors that peers access in a direct call are symmetric; without addresses for
    /// a tensor that they do not access. `None` without a lookup for another algorithm.
    ///
    /// # Errors
    /// [`DeviceError::Misaligned`] if a direct call is requested.
    fn symmetric_places(
        &self,
        domain: &Domain,
        registered: &RegisteredPlaces<'_>,
        call: &DeviceCall,
    ) -> Result<Option<(SymmetricPlace, SymmetricPlace)>, DeviceError> {
        let requested = call.options.algorithm;
        let by_copies = requested == Some(DeviceAlgorithm::CopyEngine);
        if requested.is_some_and(|given| given != DeviceAlgorithm::Direct) && !by_copies {
            return Ok(None);
        }
        let Some((input, output)) = call.operation.of_peers() else { return Ok(None) };
        let (of_input, of_output) = call.operation.lengths(self.layout.ranks);
        let place = |wanted: bool, address: u64, count: u64| {
            let memory = MemoryNumber::Segment(0);
            let unused = || SymmetricPlace { memory, offset: 0, addresses: Vec::new() };
            let bytes = count.saturating_mul(call.element.bytes() as u64);
            let found =
                || domain.place(address, bytes).or_else(|| registered.place(address, bytes));
            if wanted { found() } else { Some(unused()) }
        };
        let input = place(input, call.input, of_input);
        let (Some(input), Some(output)) = (input, place(output, call.output, of_output)) else {
            return Ok(None);
        };
        if by_copies {
            return Ok(Some((input, output)));
        }
        // Kernels copy 16-byte units between two ranks' tensors.
        for (what, place) in [("input", &input), ("output", &output)] {
            let Some((peer, theirs)) = place.differs(self.rank, UNIT) else { continue };
            if requested.is_none() {
                return Ok(None);
            }
            let operation = call.operation.name();
            let ours = place.addresses[self.rank as usize] % UNIT;
            return Err(DeviceError::Misaligned { operation, what, peer, ours, theirs });
        }
        Ok(Some((input, output)))
    }

    /// Reports device records so far. It does not wait: synchronise first to cover a call.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] with the record, or with the reason why the group ended.
    pub fn check(&self) -> Result<(), DeviceError> {
        let parts = self.parts()?;
        parts.domain.check().map_err(|error| parts.failed(error))
    }

    /// Waits until this rank's device is idle.
    ///
    /// # Errors
    /// CUDA errors from any failed work.
    pub fn settle(&self) -> Result<(), DeviceError> {
        match self.parts.as_ref().map(|parts| &parts.backend) {
            Some(Backend::Cuda(programs)) => programs.settle(),
            Some(Backend::Twin(_)) | None => Ok(()),
        }
    }

    /// Waits until this rank's device is idle and for the same call on all other ranks; then returns the memory to the
    /// domain, and unused domain memory to the GPU. Every rank calls this.
    ///
    /// # Errors
    /// CUDA's, and [`weft_fabric::Error::Timeout`] if the other ranks do not call this. In a poisoned group this does
    /// not wait.
    pub fn close(mut self, communicator: &Communicator, deadline: Time) -> Result<(), DeviceError> {
        let settled = self.settle();
        Domain::end_operator(self.end(), settled, communicator, deadline)
    }

    /// Ends it on this rank: no kernel uses the memory afterwards, except graph kernels, which return at once. Code,
    /// memory and records for them stay.
    fn end(&mut self) -> Option<Arc<Domain>> {
        let settled = self.settle();
        let Parts { backend, peers: _, block, board: _, _reservation, domain } =
            self.parts.take()?;
        let captured = self.captured.load(Ordering::Relaxed);
        let marked = settled.and_then(|()| match captured {
            // Kernels in replayed graphs return at once.
            true => Ok(domain.write_block(&block, self.layout.closed, &1u32.to_ne_bytes())?),
            false => Ok(()),
        });
        if let Err(error) = marked {
            log::warn!("device collectives memory stays allocated: {error}");
            block.keep();
            std::mem::forget(backend);
        } else if captured {
            block.keep();
            std::mem::forget(backend);
            if self.local {
                std::mem::forget(domain.clone());
            }
        }
        Some(domain)
    }

    fn parts(&self) -> Result<&Parts, DeviceError> {
        self.parts.as_ref().ok_or(closed())
    }
}

impl Drop for DeviceCollectives {
    fn drop(&mut self) {
        drop(self.end());
    }
}

fn closed() -> DeviceError {
    DeviceError::Fabric(weft_control::Error::Closed.into())
}

fn supported(reduction: Reduction, element: Element) -> Result<(), DeviceError> {
    match reduction.supports(element) {
        true => Ok(()),
        false => Err(DeviceError::Unsupported { reduction, element }),
    }
}
