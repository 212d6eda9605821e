//! Making a device all-to-all on all ranks, and ending it.

use crate::agreement;
use crate::device::all_to_all::{Backend, DeviceAllToAll, Parts};
use crate::device::config::DeviceConfig;
use crate::device::family::FAMILY;
use crate::device::launch::Sms;
use crate::device::program::{Launcher, Program};
use crate::device::shape::DeviceShape;
use crate::device::twin::Twin;
use crate::error::Error;
use crate::outcome;
use std::sync::Arc;
use std::time::Duration;
use weft_control::Operation;
use weft_fabric::{Communicator, Time};
use weft_gpu::domain::{ALIGNMENT, Block, Domain, Reservation};
use weft_gpu::{Error as GpuError, Place};

/// Where a rank's part runs, and its habits. Only the kind of place must be the same on every rank.
#[derive(Clone, Debug)]
pub struct DeviceSetup {
    /// Where the heap lies and the kernels run.
    pub place: Place,
    /// How long a wait on the device may last: by how much ranks may be apart. In a domain, the longest of all
    /// its operators.
    pub skew_timeout: Duration,
    /// Streaming multiprocessors that a launch may take; `None` leaves it to the path.
    pub num_sms: Option<u32>,
    /// Whether its calls may be under way beside those of other concurrent operators of its domain, so that
    /// all of them must fit on the GPU at once.
    pub concurrent: bool,
}

impl DeviceSetup {
    /// The defaults: ranks may be 30 seconds apart.
    pub fn new(place: Place) -> DeviceSetup {
        let skew_timeout = Duration::from_secs(30);
        DeviceSetup { place, skew_timeout, num_sms: None, concurrent: false }
    }
}

/// One rank's part before it has memory.
struct Prepared {
    domain: Arc<Domain>,
    /// `None` for the twin.
    program: Option<Program>,
    reservation: Option<Reservation>,
}

impl DeviceAllToAll {
    /// Makes an all-to-all on the domain that `domain` returns once the ranks have agreed, and in its heap; every
    /// rank calls this with the same configuration but for `rank`. When it returns, every rank's part is zeroed, so the first round may begin.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if the ranks' configurations differ; those of [`DeviceShape::new`], before
    /// anything is allocated; [`weft_gpu::Error::NotResident`] if its launches cannot be on the GPU together
    /// with those that may be; CUDA's and the heap's; [`Error::PeerFailed`] with a peer's; those of the fabric. A
    /// rank that fails tells the others, so that none waits for it.
    pub fn over(
        communicator: &Communicator,
        config: DeviceConfig,
        setup: &DeviceSetup,
        deadline: Time,
        domain: impl FnOnce() -> weft_gpu::Result<Arc<Domain>>,
    ) -> Result<DeviceAllToAll, Error> {
        let shape = agree(communicator, config, &setup.place, deadline)?;
        let domain = domain()?;
        let prepared = Prepared::new(&shape, setup, &domain);
        let prepared = together(communicator, prepared, deadline)?;
        let block = domain.allocate(communicator, shape.heap_bytes(), ALIGNMENT, deadline)?;
        Ok(prepared.finish(shape, block))
    }

    /// All ranks of a group that lives in this process, by rank: several GPUs and one process, or a test.
    /// `setups` says where each rank runs; `config.ranks` and `config.rank` are not looked at.
    ///
    /// # Errors
    /// Those of [`DeviceShape::new`], CUDA's and the heap's.
    pub fn local_group(
        config: &DeviceConfig,
        setups: &[DeviceSetup],
    ) -> Result<Vec<DeviceAllToAll>, Error> {
        shapes(config, setups.len())?;
        let places: Vec<Place> = setups.iter().map(|setup| setup.place).collect();
        let domains = Domain::local_group(&places)?;
        DeviceAllToAll::local_group_on(&domains, config, setups)
    }

    /// As [`DeviceAllToAll::local_group`], on domains that there are.
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
        let prepared = parts.map(|((shape, setup), domain)| Prepared::new(shape, setup, domain));
        let prepared = prepared.collect::<Result<Vec<_>, Error>>()?;
        let bytes = shapes.first().map_or(0, |shape| shape.heap_bytes());
        let blocks = Domain::allocate_local(domains, bytes, ALIGNMENT)?;
        let parts = shapes.into_iter().zip(prepared).zip(blocks);
        Ok(parts.map(|((shape, prepared), block)| prepared.finish(shape, block)).collect())
    }

    /// Waits until this rank's device is done, and for all other ranks to say the same; then gives its memory
    /// back to the domain, and what the domain does not need to the GPU. Every rank calls this.
    ///
    /// # Errors
    /// CUDA's, and [`weft_fabric::Error::Timeout`] if the other ranks do not come: their kernels may be
    /// writing here, so memory that they have mapped stays until they let go of it. In a poisoned group
    /// nobody can come, and nothing is waited for.
    pub fn close(mut self, communicator: &Communicator, deadline: Time) -> Result<(), Error> {
        // The others are met in any case, so that they need not wait for this rank until their deadline.
        let settled = self.settle();
        let Some(domain) = self.end() else {
            let timeout = deadline.since(weft_fabric::clock::now());
            // The peers make this call in `Domain::retire`.
            let met = communicator.control().all_gather_as(Operation::Close, &[], timeout);
            return settled
                .and(met.map(drop).map_err(|error| weft_fabric::Error::from(error).into()));
        };
        let closed = domain.retire(communicator, deadline);
        if communicator.engine().check().is_err() {
            return Ok(());
        }
        closed?;
        settled
    }
}

/// The shape that all ranks agree on. Nothing has been allocated yet.
fn agree(
    communicator: &Communicator,
    config: DeviceConfig,
    place: &Place,
    deadline: Time,
) -> Result<Arc<DeviceShape>, Error> {
    let fields = config.fields(place);
    let copies = vec![agreement::encode(&fields); communicator.world_size() as usize];
    agreement::agree(&fields, config.ranks, &communicator.trade(&copies, deadline)?)?;
    Ok(Arc::new(DeviceShape::new(config)?))
}

fn shapes(config: &DeviceConfig, ranks: usize) -> Result<Vec<Arc<DeviceShape>>, Error> {
    let ranks = ranks as u32;
    let of = |rank| DeviceShape::new(DeviceConfig { ranks, rank, ..config.clone() }).map(Arc::new);
    (0..ranks).map(of).collect()
}

impl Prepared {
    fn new(
        shape: &DeviceShape,
        setup: &DeviceSetup,
        domain: &Arc<Domain>,
    ) -> Result<Prepared, Error> {
        domain.register(&FAMILY)?;
        domain.allow(setup.skew_timeout)?;
        let program = match domain.place() {
            Place::Cuda { device, .. } => {
                let sms = Sms::new(device.sm_count(), domain.sharing(), setup.num_sms)?;
                Some(Program::new(shape, device, sms, domain.cache())?)
            }
            Place::Twin => None,
        };
        let reserve = |program: &Program| -> Result<Reservation, Error> {
            let resident = program.resident(shape, setup.concurrent)?;
            domain.reserve(resident).map_err(|error: GpuError| error.into())
        };
        let reservation = program.as_ref().map(reserve).transpose()?;
        Ok(Prepared { domain: domain.clone(), program, reservation })
    }

    /// What only wants memory.
    fn finish(self, shape: Arc<DeviceShape>, block: Block) -> DeviceAllToAll {
        let Prepared { domain, program, reservation } = self;
        let peers = block.addresses();
        let backend = match program {
            Some(program) => Backend::Cuda(Box::new(Launcher::new(program, peers, &domain))),
            None => {
                let watch = domain.alarm().watch();
                let (record, abort) = (watch.record_address(), watch.abort_address());
                let table = domain.table();
                // SAFETY: the block is zeroed, aligned, as long as the shape says, and used by twins of this
                // shape alone; it, the table and the watch outlive the twin (`Parts`).
                Backend::Twin(unsafe { Twin::new(shape.clone(), peers, table, record, abort) })
            }
        };
        DeviceAllToAll::new(shape, Parts { backend, block, _reservation: reservation, domain })
    }
}

/// Tells all ranks how it went here, and fails where it failed anywhere.
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
