//! The domain: what all operators between the GPUs of a host stand on, one for a communicator and a GPU.
//!
//! A [`Domain`] has one symmetric heap, of segments that are mapped by all ranks. [`Domain::allocate`] is a
//! collective call that gives every rank a [`Block`] at the same place of the same segment. The first bytes
//! hold the [`Table`], which kernels, Triton and the twin read. There is one watch over what kernels record, one
//! way in which all ranks learn of a failure ([`Alarm`]), one cache of compiled kernels, one stream of high
//! priority, and one [`Account`] of the launches that must be on the GPU together.
//!
//! # Who may free when
//! Dropping a block is this rank's own affair; its bytes are used again once *all* ranks have dropped it, which
//! they exchange this at the next collective call. So a peer that is late never finds another's data
//! in its block. A block that [`Block::keep`] was called on stays until the domain ends.
//!
//! A domain on which no rank has a block any more ends at [`Domain::retire`]: all its memory goes back to the GPU.
//!
//! - `table.rs`: the ABI, declared once; the C header is generated from it
//! - `allocator.rs`: offsets, as a function of the calls
//! - `account.rs`: what can be resident at once
//! - `alarm.rs`: failures, here and at peers
//! - `space.rs`: segments of the heap, and who has freed what

mod account;
mod alarm;
mod allocator;
mod space;
mod table;

pub use account::{Account, Resident};
pub use alarm::{Alarm, Group};
pub use allocator::ALIGNMENT;
pub use space::{Block, SEGMENT_BYTES};
pub use table::{MOST_RANKS, RecordLayout, TABLE_BYTES, Table, VERSION, Word, c_header};

use crate::error::{Error, Result};
use crate::heap::{Heap, Place};
use crate::jit::Cache;
use crate::watch::{Family, Watch};
use space::Space;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use weft_control::Operation;
use weft_cuda::{Context, OwnedStream, PinnedMemory, Stream, copy_async, set_bytes_async};
use weft_fabric::{Communicator, Time};

/// Words of each rank in the flags area behind the table.
pub const FLAGS_EACH: u32 = 256;

/// One rank's end of a domain.
pub struct Domain {
    rank: u32,
    ranks: u32,
    place: Place,
    sharing: u32,
    alarm: Arc<Alarm>,
    group: Group,
    /// `None` for the twin.
    gpu: Option<Gpu>,
    cache: Cache,
    account: Arc<Mutex<Account>>,
    limit: Mutex<Duration>,
    table: u64,
    space: Mutex<Space>,
}

struct Gpu {
    context: Arc<Context>,
    stream: OwnedStream,
}

/// An operator's entry in the account; it leaves when this is dropped.
#[derive(Debug)]
pub struct Reservation {
    account: Weak<Mutex<Account>>,
    number: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(account) = self.account.upgrade() {
            lock(&account).leave(self.number);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What names the GPU in every process; nothing for the CPU.
fn uuid(place: &Place) -> Vec<u8> {
    match place {
        Place::Cuda { device, .. } => device.uuid().to_vec(),
        Place::Twin => Vec::new(),
    }
}

/// What a rank makes by itself.
struct Own {
    alarm: Arc<Alarm>,
    gpu: Option<Gpu>,
}

impl Own {
    fn new(place: &Place, rank: u32) -> Result<Own> {
        let Place::Cuda { device, .. } = place else {
            return Ok(Own { alarm: Alarm::new(rank, Watch::on_host()), gpu: None });
        };
        let context = Context::primary(*device)?;
        let stream = Stream::create_first(&context)?;
        let alarm = Alarm::new(rank, Watch::on_device(&context)?);
        Ok(Own { alarm, gpu: Some(Gpu { context, stream }) })
    }
}

impl Domain {
    /// Makes the domain of a communicator whose ranks share a host; every rank calls this.
    ///
    /// # Errors
    /// Those of [`Heap::over`]; [`Error::TooManyRanks`].
    pub fn over(communicator: &Communicator, place: Place, deadline: Time) -> Result<Arc<Domain>> {
        let (rank, ranks) = (communicator.control().rank().0, communicator.world_size());
        check_ranks(ranks)?;
        let own = Own::new(&place, rank);
        let own = crate::heap::agree(communicator.control(), own, deadline)?;
        let uuid = uuid(&place);
        let uuids = crate::heap::gather(communicator.control(), Operation::Heap, &uuid, deadline)?;
        let sharing = uuids.iter().filter(|each| **each == uuid).count() as u32;
        let group = own.alarm.listen(communicator);
        let heap = Heap::over(communicator, place, first_bytes(ranks), deadline)?;
        let made = Domain::new(own, group, heap, sharing);
        crate::heap::agree(communicator.control(), made, deadline)
    }

    /// The domains of a group whose ranks all live in this process, by rank.
    ///
    /// # Errors
    /// Those of [`Heap::local_group`]; [`Error::TooManyRanks`].
    pub fn local_group(places: &[Place]) -> Result<Vec<Arc<Domain>>> {
        let ranks = places.len() as u32;
        check_ranks(ranks)?;
        let heaps = Heap::local_group(places, first_bytes(ranks))?;
        let owns = (0..).zip(places).map(|(rank, place)| Own::new(place, rank));
        let owns: Vec<Own> = owns.collect::<Result<_>>()?;
        let alarms = Group::local();
        // The only place that sets it.
        let _ = alarms.set(owns.iter().map(|own| Arc::downgrade(&own.alarm)).collect());
        let made = owns.into_iter().zip(heaps).zip(places).map(|((own, heap), place)| {
            let sharing = places.iter().filter(|other| uuid(other) == uuid(place)).count() as u32;
            Domain::new(own, Group::Local(alarms.clone()), heap, sharing)
        });
        made.collect()
    }

    fn new(own: Own, group: Group, heap: Heap, sharing: u32) -> Result<Arc<Domain>> {
        let Own { alarm, gpu } = own;
        let (rank, ranks, place) = (heap.rank(), heap.size(), heap.place());
        let sms = match place {
            Place::Cuda { device, .. } => (device.sm_count() / sharing.max(1)).max(1),
            Place::Twin => u32::MAX,
        };
        let mut peers = [0; MOST_RANKS];
        peers[..ranks as usize].copy_from_slice(heap.addresses());
        let table = Table {
            version: VERSION,
            rank,
            ranks,
            flags_each: FLAGS_EACH,
            record: alarm.watch().record_address(),
            abort: alarm.watch().abort_address(),
            flags: TABLE_BYTES,
            peers,
            ..Table::default()
        };
        let domain = Domain {
            rank,
            ranks,
            place,
            sharing,
            alarm,
            group,
            gpu,
            cache: Cache::from_env(),
            account: Arc::new(Mutex::new(Account::new(sms))),
            limit: Mutex::default(),
            table: heap.own(),
            space: Mutex::new(Space::new(heap, table_bytes(ranks))),
        };
        domain.write(0, &table.bytes())?;
        Ok(Arc::new(domain))
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Where this rank's part lies.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Ranks that have this rank's GPU, itself among them.
    pub fn sharing(&self) -> u32 {
        self.sharing
    }

    /// The address of the table.
    pub fn table(&self) -> u64 {
        self.table
    }

    /// What kernels record, and what is known of peers.
    pub fn alarm(&self) -> &Arc<Alarm> {
        &self.alarm
    }

    /// The GPU's context; none for the twin.
    pub fn context(&self) -> Option<&Arc<Context>> {
        self.gpu.as_ref().map(|gpu| &gpu.context)
    }

    /// A stream of the highest priority, for kernels that must not wait behind others; none for the twin.
    pub fn stream(&self) -> Option<Stream> {
        self.gpu.as_ref().map(|gpu| gpu.stream.stream())
    }

    /// Where compiled kernels are kept.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Registers a family: its names and texts for records with its numbers.
    ///
    /// # Errors
    /// [`Error::Families`].
    pub fn register(&self, family: &'static Family) -> Result<()> {
        self.alarm.register(family)
    }

    /// Whether the group lives, as [`Alarm::look`] finds.
    ///
    /// # Errors
    /// Why not.
    #[inline]
    pub fn look(&self) -> Result<()> {
        self.alarm.look(&self.group)
    }

    /// As [`Domain::look`], and then the notice that waits.
    ///
    /// # Errors
    /// What was recorded.
    pub fn check(&self) -> Result<()> {
        self.alarm.check(&self.group)
    }

    /// Enters an operator's largest launch in the account.
    ///
    /// # Errors
    /// [`Error::NotResident`].
    pub fn reserve(&self, resident: Resident) -> Result<Reservation> {
        let number = lock(&self.account).enter(resident)?;
        Ok(Reservation { account: Arc::downgrade(&self.account), number })
    }

    /// Lets waits on the device last so long, if they may not already.
    ///
    /// # Errors
    /// CUDA's.
    pub fn allow(&self, limit: Duration) -> Result<()> {
        let mut longest = lock(&self.limit);
        if limit <= *longest {
            return Ok(());
        }
        let nanoseconds = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.write(Word::Limit as u64, &nanoseconds.to_ne_bytes())?;
        *longest = limit;
        Ok(())
    }

    /// Allocates a block, zeroed, at a multiple of `alignment` bytes from the beginning of its segment; every rank
    /// calls this with the same numbers.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if ranks ask for different blocks; those of [`Heap::over`]; CUDA's.
    pub fn allocate(
        &self,
        communicator: &Communicator,
        bytes: u64,
        alignment: u64,
        deadline: Time,
    ) -> Result<Block> {
        let control = communicator.control();
        let mut space = lock(&self.space);
        space.alive()?;
        let mine = space.say(bytes, alignment, || self.settle())?;
        let told = crate::heap::gather(control, Operation::Heap, &mine, deadline)?;
        space.hear(bytes, alignment, &told)?;
        if let Some(block) = space.place(bytes, alignment) {
            let zeroed = self.zero(&block);
            crate::heap::agree(control, zeroed, deadline)?;
            return Ok(block);
        }
        for heap in space.take_empty(1) {
            heap.close(communicator, deadline)?;
        }
        let heap =
            Heap::over(communicator, self.place, Space::segment(bytes, alignment), deadline)?;
        space.grow(heap, bytes, alignment)
    }

    /// Allocates a block on each rank of a group that lives in this process.
    ///
    /// # Errors
    /// As [`Domain::allocate`].
    pub fn allocate_local(
        domains: &[Arc<Domain>],
        bytes: u64,
        alignment: u64,
    ) -> Result<Vec<Block>> {
        let mut spaces: Vec<_> = domains.iter().map(|domain| lock(&domain.space)).collect();
        let told = spaces.iter_mut().zip(domains).map(|(space, domain)| {
            space.alive()?;
            space.say(bytes, alignment, || domain.settle())
        });
        let told: Vec<_> = told.collect::<Result<_>>()?;
        let mut blocks = Vec::new();
        for (space, domain) in spaces.iter_mut().zip(domains) {
            space.hear(bytes, alignment, &told)?;
            if let Some(block) = space.place(bytes, alignment) {
                domain.zero(&block)?;
                blocks.push(block);
            }
        }
        if blocks.len() == domains.len() {
            return Ok(blocks);
        }
        let places: Vec<Place> = domains.iter().map(|domain| domain.place).collect();
        spaces.iter_mut().for_each(|space| drop(space.take_empty(1)));
        let heaps = Heap::local_group(&places, Space::segment(bytes, alignment))?;
        let grown = spaces.iter_mut().zip(heaps);
        grown.map(|(space, heap)| space.grow(heap, bytes, alignment)).collect()
    }

    /// Takes back what all ranks have dropped, and gives segments without blocks back to the GPU; every rank calls
    /// this. A domain in which nothing is left ends: then the answer is `true`, and operators need a new one.
    ///
    /// # Errors
    /// [`Error::Fabric`] if the other ranks do not come; then what they may still use stays.
    pub fn retire(&self, communicator: &Communicator, deadline: Time) -> Result<bool> {
        let mut space = lock(&self.space);
        if space.alive().is_err() {
            return Ok(true);
        }
        let settled = self.settle();
        let mine = space.say(0, 0, || settled)?;
        let told = crate::heap::gather(communicator.control(), Operation::Close, &mine, deadline)?;
        space.hear(0, 0, &told)?;
        let ended = space.is_idle();
        for heap in space.take_empty(u32::from(!ended)) {
            heap.close(communicator, deadline)?;
        }
        Ok(ended)
    }

    /// Whether [`Domain::retire`] has ended it.
    pub fn has_ended(&self) -> bool {
        lock(&self.space).alive().is_err()
    }

    /// True if no rank has a block, by the collective calls so far: the same on every rank.
    pub fn is_idle(&self) -> bool {
        lock(&self.space).is_idle()
    }

    /// Bytes in blocks of this rank that not all ranks have dropped, and bytes of the heap.
    pub fn usage(&self) -> (u64, u64) {
        lock(&self.space).usage()
    }

    /// Waits until this rank's device has done all that was asked of it, by whomever.
    ///
    /// # Errors
    /// CUDA's, of whatever failed there.
    pub fn settle(&self) -> Result<()> {
        self.gpu.as_ref().map_or(Ok(()), |gpu| Ok(gpu.context.synchronize()?))
    }

    /// Writes to this rank's part of a block, once all that was put on the domain's stream is done.
    ///
    /// # Errors
    /// CUDA's.
    ///
    /// # Panics
    /// If the bytes are not inside.
    pub fn write_block(&self, block: &Block, at: u64, bytes: &[u8]) -> Result<()> {
        assert!(at + bytes.len() as u64 <= block.bytes(), "inside of the block");
        self.store(block.own() + at, bytes)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.store(self.table + at, bytes)
    }

    fn store(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let Some(Gpu { context, stream }) = &self.gpu else {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            // SAFETY: within this rank's own part, which the heap keeps mapped; see `write_block` and `write`.
            unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            return Ok(());
        };
        let _current = context.enter()?;
        let pinned = PinnedMemory::alloc(context, bytes.len())?;
        // SAFETY: as many bytes of this function's own.
        unsafe { pinned.host().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        copy_async(address, pinned.device_address(), bytes.len(), stream.stream())?;
        Ok(stream.synchronize()?)
    }

    fn zero(&self, block: &Block) -> Result<()> {
        let (own, bytes) = (block.own(), block.bytes() as usize);
        let Some(Gpu { context, stream }) = &self.gpu else {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(own as usize);
            // SAFETY: the block is this rank's alone until all ranks have it.
            unsafe { to.write_bytes(0, bytes) };
            return Ok(());
        };
        let _current = context.enter()?;
        set_bytes_async(own, 0, bytes, stream.stream())?;
        Ok(stream.synchronize()?)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if let Err(error) = self.settle() {
            log::warn!("the symmetric heap stays allocated: {error}");
            lock(&self.space).leak();
        }
    }
}

impl std::fmt::Debug for Domain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Domain { rank, ranks, place, .. } = self;
        write!(f, "Domain(rank {rank} of {ranks}, {place:?})")
    }
}

fn table_bytes(ranks: u32) -> u64 {
    TABLE_BYTES + 4 * u64::from(FLAGS_EACH) * u64::from(ranks)
}

fn first_bytes(ranks: u32) -> u64 {
    Space::segment(table_bytes(ranks), ALIGNMENT)
}

fn check_ranks(ranks: u32) -> Result<()> {
    if ranks as usize > MOST_RANKS {
        return Err(Error::TooManyRanks { ranks, most: MOST_RANKS as u32 });
    }
    Ok(())
}

#[cfg(test)]
#[path = "domain_tests.rs"]
mod tests;
