//! Domain: the base for all operators between a host's GPUs, one per communicator and GPU.
//!
//! A [`Domain`] has one symmetric heap with segments that all ranks map. [`Domain::allocate`] is a collective call that
//! returns a [`Block`] at the same segment and offset on all ranks. The first bytes hold the
//! [`Table`](crate::table::Table), which kernels, Triton and the twin read. A domain has one watch for kernel records,
//! one [`FailureMonitor`] that reports failures to all ranks, one compiled-kernel cache, and one high-priority stream.
//! All domains that a process has on a GPU share an [`OccupancyBudget`] for launches that must be co-resident.
//!
//! # Lifetime of blocks
//! Dropping a block is local; the bytes are reused once *all* ranks have dropped it, which they exchange at the next
//! collective call. So a late peer never finds other data in its block. A block kept by [`Block::keep`] stays until the
//! domain ends.
//!
//! A domain without blocks at any rank ends at [`Domain::retire`], which returns all memory to the GPU.
//!
//! - `allocator.rs`: deterministic offset allocator
//! - `segments.rs`: heap segments and blocks, and the exchange of freed blocks
//! - `registrations.rs`: user memory that all ranks have mapped
//! - `occupancy.rs`: budget for co-resident launches
//! - `failure_monitor.rs`: failures at this rank and at peers
//! - `copies.rs`: copies between the host and this rank's part of the heap
//! - `proxy.rs`: a proxy's fields in the table

mod allocator;
mod copies;
mod failure_monitor;
mod occupancy;
mod proxy;
mod registrations;
mod segments;

pub use allocator::ALIGNMENT;
pub use failure_monitor::{FailureGroup, FailureMonitor, IsWaitingFor};
pub use occupancy::{OccupancyBudget, OperatorLaunch};
pub use registrations::{RegisteredPlaces, Registration, Registrations};
pub use segments::{Block, MemoryNumber, SEGMENT_BYTES, SymmetricPlace};

use crate::error::{Error, Result};
use crate::heap::{Heap, MemoryLocation};
use crate::jit::Cache;
use crate::phase::is_proxy;
use crate::table::{MAX_RANKS, TABLE_BYTES, Table, VERSION, Word};
use crate::watch::{Family, Record, Watch};
use occupancy::GpuPartition;
use segments::{Mappings, Segments};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use weft_control::Operation;
use weft_cuda::{Context, OwnedStream, Stream};
use weft_fabric::{Communicator, Time};

/// Words per rank in the flags area behind the table.
pub const FLAGS_EACH: u32 = 256;

/// One rank's domain handle.
pub struct Domain {
    rank: u32,
    ranks: u32,
    location: MemoryLocation,
    sharing: u32,
    failures: Arc<FailureMonitor>,
    group: FailureGroup,
    /// `None` for the twin.
    gpu: Option<Gpu>,
    cache: Cache,
    budget: Arc<Mutex<OccupancyBudget>>,
    limit: Mutex<Duration>,
    table: u64,
    segments: Mutex<Segments>,
    mappings: Mappings,
    registrations: Registrations,
    has_proxy: AtomicBool,
}

struct Gpu {
    context: Arc<Context>,
    stream: OwnedStream,
}

/// An operator's entry in the occupancy budget, released on drop.
#[derive(Debug)]
pub struct Reservation {
    budget: Weak<Mutex<OccupancyBudget>>,
    number: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(budget) = self.budget.upgrade() {
            lock(&budget).release(self.number);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// GPU UUID, which identifies it in all processes; empty for the CPU.
fn uuid(location: &MemoryLocation) -> Vec<u8> {
    match location {
        MemoryLocation::Cuda { device, .. } => device.uuid().to_vec(),
        MemoryLocation::Twin => Vec::new(),
    }
}

/// Resources that a rank makes without peers.
struct RankResources {
    failures: Arc<FailureMonitor>,
    gpu: Option<Gpu>,
}

impl RankResources {
    fn new(location: &MemoryLocation, rank: u32) -> Result<RankResources> {
        let MemoryLocation::Cuda { device, .. } = location else {
            return Ok(RankResources {
                failures: FailureMonitor::new(rank, Watch::on_host()),
                gpu: None,
            });
        };
        let context = Context::primary(*device)?;
        let stream = Stream::create_first(&context)?;
        let failures = FailureMonitor::new(rank, Watch::on_device(&context)?);
        Ok(RankResources { failures, gpu: Some(Gpu { context, stream }) })
    }
}

impl Domain {
    /// Makes the domain for a communicator whose ranks share a host, and which has `registrations`. Collective.
    ///
    /// # Errors
    /// Errors from [`Heap::create`]; [`Error::TooManyRanks`].
    pub fn create(
        communicator: &Communicator,
        location: MemoryLocation,
        registrations: Registrations,
        deadline: Time,
    ) -> Result<Arc<Domain>> {
        let (rank, ranks) = (communicator.control().rank().0, communicator.world_size());
        check_ranks(ranks)?;
        let own = RankResources::new(&location, rank);
        let own = crate::heap::agree(communicator.control(), own, deadline)?;
        let uuid = uuid(&location);
        let uuids = crate::heap::gather(communicator.control(), Operation::Heap, &uuid, deadline)?;
        let part = GpuPartition::of(&uuids, rank);
        let group = own.failures.subscribe(communicator);
        let heap = Heap::create(communicator, location, first_bytes(ranks), deadline)?;
        let made = Domain::new(own, group, heap, part, registrations);
        crate::heap::agree(communicator.control(), made, deadline)
    }

    /// Domains for a group whose ranks are all in this process, by rank.
    ///
    /// # Errors
    /// Errors from [`Heap::local_group`]; [`Error::TooManyRanks`].
    pub fn local_group(locations: &[MemoryLocation]) -> Result<Vec<Arc<Domain>>> {
        let ranks = locations.len() as u32;
        check_ranks(ranks)?;
        let heaps = Heap::local_group(locations, first_bytes(ranks))?;
        let owns = (0..).zip(locations).map(|(rank, location)| RankResources::new(location, rank));
        let owns: Vec<RankResources> = owns.collect::<Result<_>>()?;
        let monitors = FailureGroup::local();
        // Set here only.
        let _ = monitors.set(owns.iter().map(|own| Arc::downgrade(&own.failures)).collect());
        let uuids: Vec<_> = locations.iter().map(uuid).collect();
        let made = (0..).zip(owns).zip(heaps).map(|((rank, own), heap)| {
            Domain::new(
                own,
                FailureGroup::Local(monitors.clone()),
                heap,
                GpuPartition::of(&uuids, rank),
                Registrations::default(),
            )
        });
        made.collect()
    }

    fn new(
        own: RankResources,
        group: FailureGroup,
        heap: Heap,
        part: GpuPartition,
        registrations: Registrations,
    ) -> Result<Arc<Domain>> {
        let RankResources { failures, gpu } = own;
        let (rank, ranks, location) = (heap.rank(), heap.size(), heap.location());
        let budget = match location {
            MemoryLocation::Cuda { device, .. } => {
                occupancy::budget_of_gpu(device.uuid(), part, device.sm_count())
            }
            MemoryLocation::Twin => Arc::new(Mutex::new(OccupancyBudget::new(u32::MAX))),
        };
        let mut peers = [0; MAX_RANKS];
        peers[..ranks as usize].copy_from_slice(heap.addresses());
        let table = Table {
            version: VERSION,
            rank,
            ranks,
            flags_each: FLAGS_EACH,
            record: failures.watch().record_address(),
            abort: failures.watch().abort_address(),
            flags: TABLE_BYTES,
            peers,
            ..Table::default()
        };
        let table_address = heap.own();
        let segments = Segments::new(heap, table_bytes(ranks));
        let domain = Domain {
            rank,
            ranks,
            location,
            sharing: part.sharing,
            failures,
            group,
            gpu,
            cache: Cache::from_env(),
            budget,
            limit: Mutex::default(),
            table: table_address,
            mappings: segments.mappings(),
            segments: Mutex::new(segments),
            registrations,
            has_proxy: AtomicBool::new(false),
        };
        domain.write(0, &table.bytes())?;
        Ok(Arc::new(domain))
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// World size.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Memory location on this rank.
    pub fn location(&self) -> MemoryLocation {
        self.location
    }

    /// Number of ranks on this rank's GPU, including itself.
    pub fn sharing(&self) -> u32 {
        self.sharing
    }

    /// Table address.
    pub fn table(&self) -> u64 {
        self.table
    }

    /// Monitor for failures that kernels record or peers report.
    pub fn failures(&self) -> &Arc<FailureMonitor> {
        &self.failures
    }

    /// GPU context; `None` for the twin.
    pub fn context(&self) -> Option<&Arc<Context>> {
        self.gpu.as_ref().map(|gpu| &gpu.context)
    }

    /// Highest-priority stream, for kernels that must not queue behind others; `None` for the twin.
    pub fn stream(&self) -> Option<Stream> {
        self.gpu.as_ref().map(|gpu| gpu.stream.stream())
    }

    /// Compiled-kernel cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Registers an operator family, which explains errors in records.
    ///
    /// # Errors
    /// [`Error::Families`].
    pub fn register(&self, family: &'static Family) -> Result<()> {
        self.failures.register(family)
    }

    /// Checks for a fatal failure; see [`FailureMonitor::check_fatal`].
    ///
    /// # Errors
    /// The failure.
    #[inline]
    pub fn check_fatal(&self) -> Result<()> {
        self.failures.check_fatal(&self.group)
    }

    /// Checks for a fatal failure, then takes the pending notice. A record about a proxy is the proxy's to report.
    ///
    /// # Errors
    /// The failure or the notice.
    pub fn check(&self) -> Result<()> {
        let is_proxys = |record: &Record| is_proxy(record.phase);
        if self.has_proxy.load(Ordering::Acquire)
            && self.failures.watch().fatal().as_ref().is_some_and(is_proxys)
        {
            return Ok(());
        }
        self.failures.check(&self.group)
    }

    /// Reserves an operator's largest launch in the occupancy budget.
    ///
    /// # Errors
    /// [`Error::NotResident`].
    pub fn reserve(&self, launch: OperatorLaunch) -> Result<Reservation> {
        let number = lock(&self.budget).reserve(launch)?;
        Ok(Reservation { budget: Arc::downgrade(&self.budget), number })
    }

    /// Raises the device wait limit to at least `limit`.
    ///
    /// # Errors
    /// CUDA's.
    pub fn raise_wait_limit(&self, limit: Duration) -> Result<()> {
        let mut longest = lock(&self.limit);
        if limit <= *longest {
            return Ok(());
        }
        let nanoseconds = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.write(Word::Limit as u64, &nanoseconds.to_ne_bytes())?;
        *longest = limit;
        Ok(())
    }

    /// Allocates a zeroed block at a multiple of `alignment` bytes from the segment start. Collective, with equal
    /// arguments on all ranks.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if ranks ask for different blocks; errors from [`Heap::create`] and CUDA.
    pub fn allocate(
        &self,
        communicator: &Communicator,
        bytes: u64,
        alignment: u64,
        deadline: Time,
    ) -> Result<Block> {
        let control = communicator.control();
        let mut segments = lock(&self.segments);
        segments.check_open()?;
        let mine = segments.encode_request(bytes, alignment, || self.synchronize())?;
        let requests = crate::heap::gather(control, Operation::Heap, &mine, deadline)?;
        segments.apply_requests(bytes, alignment, &requests)?;
        if let Some(block) = segments.allocate(bytes, alignment) {
            let zeroed = self.zero(&block);
            crate::heap::agree(control, zeroed, deadline)?;
            return Ok(block);
        }
        for heap in segments.take_empty(1) {
            heap.close(communicator, deadline)?;
        }
        let heap = Heap::create(
            communicator,
            self.location,
            Segments::segment_bytes(bytes, alignment),
            deadline,
        )?;
        segments.add_segment(heap, bytes, alignment)
    }

    /// Allocates a block on each rank in a group in this process.
    ///
    /// # Errors
    /// As [`Domain::allocate`].
    pub fn allocate_local(
        domains: &[Arc<Domain>],
        bytes: u64,
        alignment: u64,
    ) -> Result<Vec<Block>> {
        let mut segments: Vec<_> = domains.iter().map(|domain| lock(&domain.segments)).collect();
        let requests = segments.iter_mut().zip(domains).map(|(segments, domain)| {
            segments.check_open()?;
            segments.encode_request(bytes, alignment, || domain.synchronize())
        });
        let requests: Vec<_> = requests.collect::<Result<_>>()?;
        let mut blocks = Vec::new();
        for (segments, domain) in segments.iter_mut().zip(domains) {
            segments.apply_requests(bytes, alignment, &requests)?;
            if let Some(block) = segments.allocate(bytes, alignment) {
                domain.zero(&block)?;
                blocks.push(block);
            }
        }
        if blocks.len() == domains.len() {
            return Ok(blocks);
        }
        let locations: Vec<MemoryLocation> = domains.iter().map(|domain| domain.location).collect();
        segments.iter_mut().for_each(|segments| drop(segments.take_empty(1)));
        let heaps = Heap::local_group(&locations, Segments::segment_bytes(bytes, alignment))?;
        let grown = segments.iter_mut().zip(heaps);
        grown.map(|(segments, heap)| segments.add_segment(heap, bytes, alignment)).collect()
    }

    /// Frees blocks that all ranks have dropped, and returns segments without blocks to the GPU. Collective. Returns
    /// `true` if the domain has no block left: it has ended, and operators need a new one.
    ///
    /// # Errors
    /// [`Error::Fabric`] if other ranks do not call it in time; memory that they may use stays allocated.
    pub fn retire(&self, communicator: &Communicator, deadline: Time) -> Result<bool> {
        let mut segments = lock(&self.segments);
        if segments.check_open().is_err() {
            return Ok(true);
        }
        let settled = self.synchronize();
        let mine = segments.encode_request(0, 0, || settled)?;
        let requests =
            crate::heap::gather(communicator.control(), Operation::Close, &mine, deadline)?;
        segments.apply_requests(0, 0, &requests)?;
        let ended = segments.is_idle();
        for heap in segments.take_empty(u32::from(!ended)) {
            heap.close(communicator, deadline)?;
        }
        Ok(ended)
    }

    /// Ends an operator on all ranks: [`Domain::retire`], or its counterpart on a rank whose operator ended before.
    /// `settled` is the outcome of this rank's own work. In a poisoned group this does not wait.
    ///
    /// # Errors
    /// Errors from [`Domain::retire`]; then the error in `settled`.
    pub fn end_operator<E: From<Error>>(
        domain: Option<Arc<Domain>>,
        settled: std::result::Result<(), E>,
        communicator: &Communicator,
        deadline: Time,
    ) -> std::result::Result<(), E> {
        let Some(domain) = domain else {
            // Meets the other ranks, so that they do not wait until the deadline.
            let timeout = deadline.since(weft_fabric::clock::now());
            let met = communicator.control().all_gather_as(Operation::Close, &[], timeout);
            return settled.and(
                met.map(drop).map_err(|error| Error::from(weft_fabric::Error::from(error)).into()),
            );
        };
        let closed = domain.retire(communicator, deadline);
        if communicator.engine().check().is_err() {
            return Ok(());
        }
        closed?;
        settled
    }

    /// True once [`Domain::retire`] has ended it.
    pub fn has_ended(&self) -> bool {
        lock(&self.segments).check_open().is_err()
    }

    /// True if no rank had a block at the last collective call; equal on all ranks.
    pub fn is_idle(&self) -> bool {
        lock(&self.segments).is_idle()
    }

    /// Symmetric place for `bytes` bytes that are at `address` on this rank; `None` if they are not in the heap. It
    /// does not wait for collective calls.
    pub fn place(&self, address: u64, bytes: u64) -> Option<SymmetricPlace> {
        self.mappings.place(address, bytes)
    }

    /// User memory that the communicator has registered.
    pub fn registrations(&self) -> &Registrations {
        &self.registrations
    }

    /// Bytes in blocks that not all ranks have dropped, and bytes in the heap.
    pub fn usage(&self) -> (u64, u64) {
        lock(&self.segments).usage()
    }

    /// Waits for all work on this rank's GPU, in all streams.
    ///
    /// # Errors
    /// CUDA errors, including errors from earlier work.
    pub fn synchronize(&self) -> Result<()> {
        self.gpu.as_ref().map_or(Ok(()), |gpu| Ok(gpu.context.synchronize()?))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if let Err(error) = self.synchronize() {
            log::warn!("symmetric heap left allocated: {error}");
            lock(&self.segments).leak();
        }
    }
}

impl std::fmt::Debug for Domain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Domain { rank, ranks, location, .. } = self;
        write!(f, "Domain(rank {rank} of {ranks}, {location:?})")
    }
}

fn table_bytes(ranks: u32) -> u64 {
    TABLE_BYTES + 4 * u64::from(FLAGS_EACH) * u64::from(ranks)
}

fn first_bytes(ranks: u32) -> u64 {
    Segments::segment_bytes(table_bytes(ranks), ALIGNMENT)
}

fn check_ranks(ranks: u32) -> Result<()> {
    if ranks as usize > MAX_RANKS {
        return Err(Error::TooManyRanks { ranks, most: MAX_RANKS as u32 });
    }
    Ok(())
}

#[cfg(test)]
#[path = "domain_tests.rs"]
mod tests;
