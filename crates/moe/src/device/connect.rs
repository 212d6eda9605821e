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
use weft_cuda::{PinnedMemory, Stream, copy_async};
use weft_fabric::{Communicator, Time};
use weft_gpu::domain::{Alarm, Group};
use weft_gpu::jit::Cache;
use weft_gpu::{Heap, Place, Watch};

/// Where a rank's part runs, and its habits. Only the kind of place must be the same on every rank.
#[derive(Clone, Debug)]
pub struct DeviceSetup {
    /// Where the heap lies and the kernels run.
    pub place: Place,
    /// How long a wait on the device may last: by how much ranks may be apart.
    pub skew_timeout: Duration,
    /// Streaming multiprocessors that a launch may take; `None` leaves it to the path.
    pub num_sms: Option<u32>,
}

impl DeviceSetup {
    /// The defaults: ranks may be 30 seconds apart.
    pub fn new(place: Place) -> DeviceSetup {
        DeviceSetup { place, skew_timeout: Duration::from_secs(30), num_sms: None }
    }

    /// What names the GPU in every process; nothing for the CPU.
    fn uuid(&self) -> Vec<u8> {
        match self.place {
            Place::Cuda { device, .. } => device.uuid().to_vec(),
            Place::Twin => Vec::new(),
        }
    }
}

/// Where `limit_ns` stands in a heap.
const LIMIT_AT: u64 = crate::device::areas::GlobalWord::Limit as u64;

/// One rank's part before there is a heap.
struct Prepared {
    setup: DeviceSetup,
    /// `None` for the twin.
    program: Option<Program>,
    alarm: Arc<Alarm>,
}

impl DeviceAllToAll {
    /// Makes an all-to-all over a communicator whose ranks share a host; every rank calls this with the
    /// same configuration but for `rank`. When it returns, every rank's heap is zeroed and mapped by all,
    /// so the first round may begin.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if the ranks' configurations differ; those of [`DeviceShape::new`], before
    /// anything is allocated; CUDA's and the heap's; [`Error::PeerFailed`] with a peer's; those of the
    /// fabric. A rank that fails tells the others, so that none waits for it.
    pub fn over(
        communicator: &Communicator,
        config: DeviceConfig,
        setup: &DeviceSetup,
        deadline: Time,
    ) -> Result<DeviceAllToAll, Error> {
        let fields = config.fields(&setup.place);
        let copies = vec![agreement::encode(&fields); communicator.world_size() as usize];
        agreement::agree(&fields, config.ranks, &communicator.trade(&copies, deadline)?)?;
        let shape = Arc::new(DeviceShape::new(config)?);

        let uuid = setup.uuid();
        let uuids = communicator.trade(&vec![uuid.clone(); copies.len()], deadline)?;
        let sharing = uuids.iter().filter(|each| **each == uuid).count() as u32;
        let prepared = Prepared::new(&shape, setup, sharing);
        let prepared = together(communicator, prepared, deadline)?;
        let group = prepared.alarm.listen(communicator);
        let heap = Heap::over(communicator, setup.place, shape.heap_bytes(), deadline)?;
        let made = prepared.finish(shape, group, heap);
        together(communicator, made, deadline)
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
        let ranks = setups.len() as u32;
        let shape_of = |rank| DeviceShape::new(DeviceConfig { ranks, rank, ..config.clone() });
        let shapes: Vec<_> = (0..ranks).map(|rank| shape_of(rank).map(Arc::new)).collect();
        let shapes = shapes.into_iter().collect::<Result<Vec<_>, Error>>()?;
        let prepared = shapes.iter().zip(setups).map(|(shape, setup)| {
            let uuid = setup.uuid();
            let sharing = setups.iter().filter(|other| other.uuid() == uuid).count() as u32;
            Prepared::new(shape, setup, sharing)
        });
        let prepared = prepared.collect::<Result<Vec<_>, Error>>()?;

        let alarms = Group::local();
        // Nobody else sets it.
        let _ = alarms.set(prepared.iter().map(|each| Arc::downgrade(&each.alarm)).collect());
        let places: Vec<Place> = setups.iter().map(|setup| setup.place).collect();
        let bytes = shapes.first().map_or(0, |shape| shape.heap_bytes());
        let heaps = Heap::local_group(&places, bytes)?;
        let parts = shapes.into_iter().zip(prepared).zip(heaps);
        parts
            .map(|((shape, prepared), heap)| {
                prepared.finish(shape, Group::Local(alarms.clone()), heap)
            })
            .collect()
    }

    /// Waits until this rank's device is done, and for all other ranks to say the same; then gives all
    /// memory back. Every rank calls this.
    ///
    /// # Errors
    /// CUDA's, and [`weft_fabric::Error::Timeout`] if the other ranks do not come: their kernels may be
    /// writing here, so memory that they have mapped stays until they let go of it. In a poisoned group
    /// nobody can come, and nothing is waited for.
    pub fn close(mut self, communicator: &Communicator, deadline: Time) -> Result<(), Error> {
        // The others are met in any case, so that they need not wait for this rank until their deadline.
        let settled = self.settle();
        let Some(Parts { backend, heap, alarm }) = self.take() else {
            let timeout = deadline.since(weft_fabric::clock::now());
            // The peers make this call in `Heap::close`.
            let met = communicator.control().all_gather_as(Operation::Close, &[], timeout);
            return settled
                .and(met.map(drop).map_err(|error| weft_fabric::Error::from(error).into()));
        };
        drop(backend);
        let closed = heap.close(communicator, deadline);
        drop(alarm);
        if communicator.engine().check().is_err() { Ok(()) } else { Ok(closed?) }
    }
}

impl Prepared {
    /// `sharing` ranks have the same GPU as this one, itself among them.
    fn new(shape: &DeviceShape, setup: &DeviceSetup, sharing: u32) -> Result<Prepared, Error> {
        let (program, watch) = match setup.place {
            Place::Cuda { device, .. } => {
                let sms = Sms::new(device.sm_count(), sharing, setup.num_sms)?;
                let program = Program::new(shape, device, sms, &Cache::from_env())?;
                let watch = Watch::on_device(program.context())?;
                (Some(program), watch)
            }
            Place::Twin => (None, Watch::on_host()),
        };
        let alarm = Alarm::new(shape.config().rank, watch);
        alarm.register(&FAMILY)?;
        Ok(Prepared { setup: setup.clone(), program, alarm })
    }

    /// What only wants a heap.
    fn finish(
        self,
        shape: Arc<DeviceShape>,
        group: Group,
        heap: Heap,
    ) -> Result<DeviceAllToAll, Error> {
        let Prepared { setup, program, alarm } = self;
        let (record, abort) = (alarm.watch().record_address(), alarm.watch().abort_address());
        let backend = match program {
            Some(program) => {
                write_limit(&program, heap.own(), setup.skew_timeout)?;
                let rank = shape.config().rank;
                let launcher = Launcher::new(program, heap.addresses(), rank, record, abort);
                Backend::Cuda(Box::new(launcher))
            }
            None => {
                let peers = heap.addresses().to_vec();
                // SAFETY: the heap is zeroed, page-aligned, as long as the shape says, and used by twins
                // of this shape alone; it and the watch outlive the twin (`Parts`).
                let twin = unsafe { Twin::new(shape.clone(), peers, record, abort) };
                twin.set_limit(setup.skew_timeout);
                Backend::Twin(twin)
            }
        };
        Ok(DeviceAllToAll::new(shape, group, Parts { backend, heap, alarm }))
    }
}

/// Tells this rank's device how long a wait may last. In memory, where captured graphs read it anew.
fn write_limit(program: &Program, heap: u64, limit: Duration) -> Result<(), Error> {
    let nanoseconds = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    let context = program.context();
    let _current = context.enter()?;
    let pinned = PinnedMemory::alloc(context, size_of::<u64>())?;
    // SAFETY: eight bytes of this function's own, on a page's boundary.
    unsafe { pinned.host().cast::<u64>().write(nanoseconds) };
    let stream = Stream::create(context)?;
    let at = heap + LIMIT_AT;
    copy_async(at, pinned.device_address(), size_of::<u64>(), stream.stream())?;
    Ok(stream.synchronize()?)
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
