//! Constructing a device all-to-all on all ranks, and ending it.

use crate::device::abi::family::FAMILY;
use crate::device::calls::all_to_all::{Backend, DeviceAllToAll, DeviceParts};
use crate::device::launch::grid::SmBudget;
use crate::device::launch::launcher::Launcher;
use crate::device::launch::program::Program;
use crate::device::options::{DeviceConfig, DeviceSetup};
use crate::device::shape::DeviceShape;
use crate::device::shape::channel_layout::AREA_ALIGNMENT;
use crate::device::twin::Twin;
use crate::error::Error;
use crate::protocol::outcome;
use crate::shape::agreement;
use std::sync::Arc;
use weft_fabric::{Communicator, Time};
use weft_gpu::domain::{ALIGNMENT, Block, Domain, Reservation};
use weft_gpu::{Error as GpuError, MemoryLocation};

/// One rank's part before memory is allocated.
struct PreparedRank {
    domain: Arc<Domain>,
    /// `None` for the twin.
    program: Option<Program>,
    reservation: Option<Reservation>,
}

impl DeviceAllToAll {
    /// Creates an all-to-all in the heap of the domain that `domain` returns once the ranks have agreed.
    /// Every rank calls this with the same configuration but for `rank`. On return every rank's block is
    /// zeroed, so the first round may begin.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if the ranks' configurations differ; errors from [`DeviceShape::new`], before
    /// any allocation; [`weft_gpu::Error::NotResident`] if the launches do not fit on the GPU together with
    /// the other concurrent ones; CUDA and heap errors; [`Error::PeerFailed`] with a peer's error; fabric
    /// errors. A rank that fails notifies the others, so that none waits for it.
    pub fn over(
        communicator: &Communicator,
        config: DeviceConfig,
        setup: &DeviceSetup,
        deadline: Time,
        domain: impl FnOnce() -> weft_gpu::Result<Arc<Domain>>,
    ) -> Result<DeviceAllToAll, Error> {
        let shape = agree(communicator, config, &setup.place, deadline)?;
        let domain = domain()?;
        let prepared = PreparedRank::new(&shape, setup, &domain);
        let prepared = together(communicator, prepared, deadline)?;
        let block = domain.allocate(communicator, shape.heap_bytes(), ALIGNMENT, deadline)?;
        prepared.finish(shape, block)
    }

    /// Creates all ranks in a group within this process, by rank: several GPUs in one process, or a test.
    /// `setups` has each rank's device; `config.ranks` and `config.rank` are ignored.
    ///
    /// # Errors
    /// Errors from [`DeviceShape::new`], CUDA and the heap.
    pub fn local_group(
        config: &DeviceConfig,
        setups: &[DeviceSetup],
    ) -> Result<Vec<DeviceAllToAll>, Error> {
        shapes(config, setups.len())?;
        let places: Vec<MemoryLocation> = setups.iter().map(|setup| setup.place).collect();
        let domains = Domain::local_group(&places)?;
        DeviceAllToAll::local_group_on(&domains, config, setups)
    }

    /// [`DeviceAllToAll::local_group`] on existing domains.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::local_group`].
    pub fn local_group_on(
        domains: &[Arc<Domain>],
        config: &DeviceConfig,
        setups: &[DeviceSetup],
    ) -> Result<Vec<DeviceAllToAll>, Error> {
        let shapes = shapes(config, setups.len())?;
        let parts = shapes.iter().zip(setups).zip(domains);
        let prepared =
            parts.map(|((shape, setup), domain)| PreparedRank::new(shape, setup, domain));
        let prepared = prepared.collect::<Result<Vec<_>, Error>>()?;
        let bytes = shapes.first().map_or(0, |shape| shape.heap_bytes());
        let blocks = Domain::allocate_local(domains, bytes, ALIGNMENT)?;
        let parts = shapes.into_iter().zip(prepared).zip(blocks);
        parts.map(|((shape, prepared), block)| prepared.finish(shape, block)).collect()
    }

    /// Waits until this rank's device is idle and all other ranks have made the same call; then returns the
    /// all-to-all's memory to the domain, and the domain's unused memory to the GPU. Every rank calls this.
    ///
    /// # Errors
    /// CUDA errors, and [`weft_fabric::Error::Timeout`] if the other ranks do not call this: their kernels
    /// may be writing here, so memory that they have mapped stays until they release it. In a poisoned group
    /// this does not wait.
    pub fn close(mut self, communicator: &Communicator, deadline: Time) -> Result<(), Error> {
        let settled = self.settle();
        Domain::end_operator(self.end(), settled, communicator, deadline)
    }
}

/// The shape that all ranks agree on, before any allocation.
fn agree(
    communicator: &Communicator,
    config: DeviceConfig,
    place: &MemoryLocation,
    deadline: Time,
) -> Result<Arc<DeviceShape>, Error> {
    let fields = config.fields(place);
    let copies = vec![agreement::encode(&fields); communicator.world_size() as usize];
    agreement::agree(&fields, config.ranks, &communicator.exchange(&copies, deadline)?)?;
    Ok(Arc::new(DeviceShape::new(config)?))
}

fn shapes(config: &DeviceConfig, ranks: usize) -> Result<Vec<Arc<DeviceShape>>, Error> {
    let ranks = ranks as u32;
    let of = |rank| DeviceShape::new(DeviceConfig { ranks, rank, ..config.clone() }).map(Arc::new);
    (0..ranks).map(of).collect()
}

impl PreparedRank {
    fn new(
        shape: &DeviceShape,
        setup: &DeviceSetup,
        domain: &Arc<Domain>,
    ) -> Result<PreparedRank, Error> {
        domain.register(&FAMILY)?;
        domain.raise_wait_limit(setup.skew_timeout)?;
        let program = match domain.location() {
            MemoryLocation::Cuda { device, .. } => {
                let sms = SmBudget::new(device.sm_count(), domain.sharing(), setup.num_sms)?;
                Some(Program::new(shape, device, sms, domain.cache())?)
            }
            MemoryLocation::Twin => None,
        };
        let reserve = |program: &Program| -> Result<Reservation, Error> {
            let resident = program.resident(shape, setup.concurrent)?;
            domain.reserve(resident).map_err(|error: GpuError| error.into())
        };
        let reservation = program.as_ref().map(reserve).transpose()?;
        Ok(PreparedRank { domain: domain.clone(), program, reservation })
    }

    /// Completes the rank with a memory block.
    fn finish(self, shape: Arc<DeviceShape>, block: Block) -> Result<DeviceAllToAll, Error> {
        let PreparedRank { domain, program, reservation } = self;
        let (peers, number) = (block.addresses(), number_of(&block));
        let backend = match program {
            Some(program) => {
                Backend::Cuda(Box::new(Launcher::new(program, &shape, peers, number, &domain)))
            }
            None => {
                let watch = domain.failures().watch();
                let (record, abort) = (watch.record_address(), watch.abort_address());
                let table = domain.table();
                // SAFETY: the block is zeroed, aligned, as long as the shape requires, and used only by twins
                // with this shape; the block, the table and the watch outlive the twin (`DeviceParts`).
                let twin = unsafe { Twin::new(shape.clone(), peers, table, record, abort) };
                Backend::Twin(twin.numbered(number))
            }
        };
        let made = DeviceAllToAll::new(
            shape,
            DeviceParts { backend, block, _reservation: reservation, domain },
        );
        made.write_first_maps()?;
        Ok(made)
    }
}

/// Block number in the heap; equal on every rank.
fn number_of(block: &Block) -> u32 {
    (block.segment() << 24).wrapping_add((block.offset() / AREA_ALIGNMENT) as u32)
}

/// Exchanges all ranks' outcomes, and fails if any rank failed.
fn together<T>(
    communicator: &Communicator,
    outcome: Result<T, Error>,
    deadline: Time,
) -> Result<T, Error> {
    let failed = outcome::trade(communicator, &outcome, deadline);
    let made = outcome?;
    match failed? {
        None => Ok(made),
        Some((peer, detail)) => Err(Error::PeerFailed { peer, detail }),
    }
}

#[cfg(test)]
#[path = "connect_tests.rs"]
mod tests;
