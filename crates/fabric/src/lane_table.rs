//! Engine lane table: the shared lane words, and the peers to which lanes are issued.

use crate::atomics::{CacheLine, Word64};
use crate::error::{Error, Result};
use crate::lanes::{Lanes, SleepMode, Wake};
use crate::memory::{Memory, prefetch};
use crate::types::{Generation, Lane, LaneId};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weft_control::Rank;

/// Shared words in a lane table, this engine's own or a mapped peer's.
#[derive(Debug)]
pub struct LaneWords {
    memory: Arc<Memory>,
    /// First byte.
    base: NonNull<u8>,
    capacity: usize,
    leaves: usize,
    /// Cache lines, two words each.
    pairs: usize,
}

// SAFETY: `base` points into `memory`, which is Send; the words are only ever accessed atomically.
unsafe impl Send for LaneWords {}
// SAFETY: as above.
unsafe impl Sync for LaneWords {}

const LINE: usize = size_of::<CacheLine<AtomicU64>>();

impl LaneWords {
    /// Byte size for a table with `capacity` lanes: a cache line for the doorbell, one for each leaf, one
    /// for each two words.
    pub fn bytes_for(capacity: usize) -> usize {
        LINE * (1 + capacity.div_ceil(64) + capacity.div_ceil(2))
    }

    /// Views `memory` as a table with `capacity` lanes; `None` if the memory is too small or misaligned.
    pub fn new(memory: Arc<Memory>, capacity: usize) -> Option<LaneWords> {
        let base = memory.host()?;
        let aligned = base.as_ptr().addr().is_multiple_of(align_of::<CacheLine<AtomicU64>>());
        let fits = capacity <= LaneId::LIMIT as usize && Self::bytes_for(capacity) <= memory.len();
        let (leaves, pairs) = (capacity.div_ceil(64), capacity.div_ceil(2));
        (aligned && fits).then_some(LaneWords { memory, base, capacity, leaves, pairs })
    }

    /// The words.
    #[inline]
    pub fn lanes(&self) -> Lanes<'_, AtomicU32, AtomicU64> {
        let base = self.base.as_ptr();
        // SAFETY: `new` checked alignment and size; every bit pattern is a valid atomic; the words
        // are only ever accessed atomically, here and in every process that maps them.
        unsafe {
            let line = |index: usize| base.add(index * LINE);
            Lanes {
                doorbell: &*line(0).cast::<CacheLine<AtomicU32>>(),
                leaves: std::slice::from_raw_parts(line(1).cast(), self.leaves),
                words: std::slice::from_raw_parts(line(1 + self.leaves).cast(), self.pairs),
            }
        }
    }

    /// A lane's value (acquire load: the agent's earlier writes are visible).
    ///
    /// # Panics
    /// If the lane is beyond the capacity.
    #[inline(always)]
    pub fn value(&self, lane: usize) -> u64 {
        assert!(lane < self.capacity);
        let base = self.base;
        // SAFETY: as in `lanes`; lane words lie two to a line behind the doorbell and the leaves.
        let word = unsafe {
            let line = base.as_ptr().add((1 + self.leaves + lane / 2) * LINE);
            &*line.cast::<AtomicU64>().add(lane % 2)
        };
        Word64::load(word)
    }

    /// Prefetches a lane's cache line.
    #[inline(always)]
    pub fn prefetch(&self, lane: usize) {
        prefetch::for_load(self.base.as_ptr().wrapping_add((1 + self.leaves + lane / 2) * LINE));
    }

    /// Prefetches a leaf's cache line, to change it.
    #[inline(always)]
    pub fn prefetch_leaf(&self, leaf: usize) {
        prefetch::for_store(self.base.as_ptr().wrapping_add((1 + leaf) * LINE));
    }

    /// Lane count.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The memory behind the words.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

/// Performs the wake-up that a raise returned; false if it lacks the descriptor for it.
pub fn wake(
    lanes: Lanes<'_, AtomicU32, AtomicU64>,
    wake: Wake,
    descriptor: Option<&OwnedFd>,
) -> bool {
    use crate::atomics::Word32;
    if matches!(wake, Wake::Word | Wake::WordAndDescriptor) {
        lanes.doorbell.0.wake();
    }
    if matches!(wake, Wake::Descriptor | Wake::WordAndDescriptor) {
        let Some(descriptor) = descriptor else { return false };
        signal(descriptor.as_fd());
    }
    true
}

fn signal(descriptor: BorrowedFd<'_>) {
    // Increments by one cannot overflow an eventfd counter.
    let _ = rustix::io::write(descriptor, &1u64.to_ne_bytes());
}

/// Dropped arrivals, by reason.
#[derive(Debug, Default)]
pub struct DroppedArrivals {
    /// Free lane, or lane issued to another peer.
    pub ungranted: AtomicU64,
    /// Lane from another generation.
    pub stale: AtomicU64,
}

/// The owner's side of a lane table.
#[derive(Debug)]
pub struct LaneTable {
    words: LaneWords,
    generation: Generation,
    /// Holder and generation for each lane: see [`LaneHolder`].
    holders: Box<[AtomicU64]>,
    blocks: Mutex<LaneBlocks>,
    /// Lane that was taken last: a hint. It has a separate cache line, since other threads read the
    /// fields beside it.
    last_taken: CacheLine<AtomicU32>,
    wake: OwnedFd,
    dropped: DroppedArrivals,
}

/// Encodes a lane's holder: bits 0 to 7 generation, above them the rank plus one; zero for a lane that
/// was never issued. The top bit marks a released lane.
struct LaneHolder;

impl LaneHolder {
    const FREE: u64 = 1 << 63;

    fn of(peer: Rank, generation: Generation) -> u64 {
        (u64::from(peer.0) + 1) << 8 | u64::from(generation.0)
    }

    fn peer(word: u64) -> Option<Rank> {
        if word & LaneHolder::FREE == 0 { LaneHolder::last_peer(word) } else { None }
    }

    /// Holder, also for a released lane.
    fn last_peer(word: u64) -> Option<Rank> {
        ((word & !LaneHolder::FREE) >> 8).checked_sub(1).map(|rank| Rank(rank as u32))
    }

    fn generation(word: u64) -> Generation {
        Generation(word as u8)
    }
}

/// Free lanes: the number ever issued, and the released blocks by length and last holder.
#[derive(Debug, Default)]
struct LaneBlocks {
    issued: u32,
    free: HashMap<(u32, Rank), Vec<Lane>>,
}

impl LaneBlocks {
    /// A released block from the same holder, so that late arrivals on it are attributed to this peer.
    fn take_own(&mut self, peer: Rank, count: u32) -> Option<Lane> {
        self.free.get_mut(&(count, peer))?.pop()
    }

    /// A released block from any peer, for a full table.
    fn take_any(&mut self, count: u32) -> Option<Lane> {
        let mut fitting = self.free.iter_mut().filter(|((length, _), _)| *length == count);
        fitting.find_map(|(_, blocks)| blocks.pop())
    }
}

impl LaneTable {
    /// Empty table. Lanes that are never issued take no memory.
    pub fn new(capacity: usize, generation: Generation) -> Result<LaneTable> {
        let memory = Arc::new(Memory::shared(LaneWords::bytes_for(capacity))?);
        let words = LaneWords::new(memory, capacity).ok_or(Error::Limit {
            what: "lanes in one engine",
            wanted: capacity as u64,
            limit: LaneId::LIMIT.into(),
        })?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("cannot create an event descriptor", e))?;
        let holders = zeroed(capacity);
        let (blocks, dropped) = (Mutex::default(), DroppedArrivals::default());
        let last_taken = CacheLine::default();
        Ok(LaneTable { words, generation, holders, blocks, last_taken, wake, dropped })
    }

    fn blocks(&self) -> MutexGuard<'_, LaneBlocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Issues `count` lanes in a row to `peer`, all at zero; returns the first. Lanes 2i and 2i+1 share a
    /// cache line, so `count` is even. A released block is issued again in the next generation, to the same
    /// peer as long as others are free.
    pub fn issue(&self, peer: Rank, count: u32) -> Result<Lane> {
        debug_assert!(count.is_multiple_of(2));
        let mut blocks = self.blocks();
        let wanted = u64::from(blocks.issued) + u64::from(count);
        let limit = self.holders.len() as u64;
        let first = match blocks.take_own(peer, count) {
            Some(first) => first,
            None if wanted <= limit && blocks.issued < LaneId::LIMIT => {
                let first = LaneId::new(blocks.issued).map(|id| Lane::new(id, self.generation));
                blocks.issued += count;
                first.ok_or(Error::Limit { what: "lanes in one engine", wanted, limit })?
            }
            None => {
                let any = blocks.take_any(count);
                any.ok_or(Error::Limit { what: "lanes in one engine", wanted, limit })?
            }
        };
        let begin = first.id().get() as usize;
        for number in begin..begin + count as usize {
            self.words.lanes().reset(number);
            self.holders[number].store(LaneHolder::of(peer, first.generation()), Ordering::Release);
        }
        Ok(first)
    }

    /// Releases a block of lanes that no peer raises any more: later arrivals that name them are dropped
    /// and counted. After 256 generations a block is retired.
    pub fn release(&self, first: Lane, count: u32) {
        let next = Generation(first.generation().0.wrapping_add(1));
        let renewed = (next != self.generation).then_some(Lane::new(first.id(), next));
        self.take_back(first, count, renewed);
    }

    /// Releases a block of lanes that was granted to no peer, to be issued again in the same generation.
    pub fn cancel(&self, first: Lane, count: u32) {
        self.take_back(first, count, Some(first));
    }

    fn take_back(&self, first: Lane, count: u32, renewed: Option<Lane>) {
        let begin = first.id().get() as usize;
        for number in begin..begin + count as usize {
            self.holders[number].fetch_or(LaneHolder::FREE, Ordering::AcqRel);
        }
        if let (Some(renewed), Some(peer)) = (renewed, self.last_holder(first)) {
            self.blocks().free.entry((count, peer)).or_default().push(renewed);
        }
    }

    /// Raises a lane by one. The caller is the agent for the lane's holder, one thread at a time. Returns
    /// the holder. An arrival for a free lane or another generation is dropped and counted.
    pub fn arrive(&self, lane: Lane) -> Option<Rank> {
        let peer = self.arrive_in_poll(lane)?;
        self.set_dirty(lane.id());
        Some(peer)
    }

    /// [`LaneTable::arrive`] inside [`crate::Link::poll`]: the link reports the lane in the
    /// [`crate::link::Sink`] in place of a dirty bit. The engine takes the lane next and wakes sleeping
    /// threads and the event loop.
    #[inline]
    pub fn arrive_in_poll(&self, lane: Lane) -> Option<Rank> {
        let number = lane.id().get() as usize;
        let word = self.holders.get(number).map_or(0, |holder| holder.load(Ordering::Acquire));
        let holder =
            LaneHolder::peer(word).filter(|_| lane.generation() == LaneHolder::generation(word));
        if holder.is_none() {
            self.refuse(lane, word);
            return None;
        }
        let lanes = self.words.lanes();
        lanes.raise_unmarked(number, lanes.value(number) + 1);
        holder
    }

    /// Sets the dirty bit for a lane raised by [`LaneTable::arrive_in_poll`], and wakes the owner.
    pub fn set_dirty(&self, lane: LaneId) {
        let lanes = self.words.lanes();
        wake(lanes, lanes.set_dirty(lane.get() as usize), Some(&self.wake));
    }

    /// Counts a dropped arrival; `word` is the lane's holder word.
    #[cold]
    #[inline(never)]
    fn refuse(&self, lane: Lane, word: u64) {
        let number = lane.id().get();
        if LaneHolder::peer(word).is_none() {
            if should_log(&self.dropped.ungranted) {
                log::warn!("dropped an arrival: lane {number} is not granted");
            }
        } else if should_log(&self.dropped.stale) {
            log::warn!(
                "dropped an arrival: lane {number} of generation {}, this is {}",
                lane.generation().0,
                LaneHolder::generation(word).0
            );
        }
    }

    /// A lane's last holder, for a transport that counts arrivals by peer. `None` for a lane that was
    /// never issued.
    pub fn last_holder(&self, lane: Lane) -> Option<Rank> {
        let word = self.holders.get(lane.id().get() as usize)?.load(Ordering::Acquire);
        LaneHolder::last_peer(word)
    }

    /// [`LaneTable::arrive`] for a transport that identifies the sender: an arrival on another peer's lane
    /// is dropped and counted, too. Returns true if the lane was raised.
    pub fn arrive_from(&self, peer: Rank, lane: Lane) -> bool {
        self.is_open_to(peer, lane) && self.arrive(lane).is_some()
    }

    /// [`LaneTable::arrive_in_poll`] for a transport that identifies the sender.
    pub fn arrive_from_in_poll(&self, peer: Rank, lane: Lane) -> Option<Rank> {
        if self.is_open_to(peer, lane) { self.arrive_in_poll(lane) } else { None }
    }

    /// True unless the lane is granted to another peer; counts the dropped arrival then.
    fn is_open_to(&self, peer: Rank, lane: Lane) -> bool {
        let number = lane.id().get() as usize;
        let word = self.holders.get(number).map_or(0, |holder| holder.load(Ordering::Acquire));
        if LaneHolder::peer(word).is_some_and(|holder| holder != peer) {
            if should_log(&self.dropped.ungranted) {
                log::warn!("dropped an arrival from {peer}: lane {number} is not granted to it");
            }
            return false;
        }
        true
    }

    /// Wakes the owner without a raise.
    pub fn notify(&self) {
        let lanes = self.words.lanes();
        wake(lanes, lanes.notify(), Some(&self.wake));
    }

    /// The lane's value.
    #[inline(always)]
    pub fn value(&self, id: LaneId) -> u64 {
        self.words.value(id.get() as usize)
    }

    /// Prefetches the lane's cache line.
    #[inline(always)]
    pub fn prefetch(&self, id: LaneId) {
        self.words.prefetch(id.get() as usize);
    }

    /// Owner: see [`Lanes::has_dirty`].
    #[inline(always)]
    pub fn has_dirty(&self) -> bool {
        self.words.lanes().has_dirty()
    }

    /// Owner: see [`Lanes::take_dirty`].
    pub fn take_dirty(&self, mut rose: impl FnMut(usize)) -> bool {
        let mut last = None;
        let found = self.words.lanes().take_dirty(|lane| {
            last = Some(lane);
            rose(lane);
        });
        if let Some(last) = last {
            self.last_taken.0.store(last as u32, Ordering::Relaxed);
        }
        found
    }

    /// Owner, with dirty bits: prefetches the lane that was taken last, and the dirty bits for it. With
    /// few writes in flight the next one is likely to raise it again.
    #[inline]
    pub fn prefetch_dirty(&self) {
        let last = self.last_taken.0.load(Ordering::Relaxed) as usize;
        self.words.prefetch_leaf(last / 64);
        self.words.prefetch(last);
    }

    /// Owner: see [`Lanes::take_message`].
    pub fn take_message(&self) -> bool {
        self.words.lanes().take_message()
    }

    /// Owner: see [`Lanes::prepare_sleep`].
    pub fn prepare_sleep(&self, mode: SleepMode) -> bool {
        self.words.lanes().prepare_sleep(mode)
    }

    /// Owner: sleeps on the doorbell word until a raise, a notification or `timeout`. Follows a
    /// [`LaneTable::prepare_sleep`] that returned `true`.
    pub fn sleep_on_word(&self, timeout: Duration) {
        self.words.lanes().sleep_on_word(timeout);
    }

    /// Owner: withdraws the announcement from [`LaneTable::prepare_sleep`]. Clears the descriptor unless
    /// another sleeper uses it.
    pub fn finish_sleep(&self, mode: SleepMode) {
        if self.words.lanes().finish_sleep(mode) && mode != SleepMode::Word {
            let mut count = [0; 8];
            // Usually empty: another descriptor became readable.
            let _ = rustix::io::read(&self.wake, &mut count);
        }
    }

    /// Readable after a raise that found the owner asleep on it.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// The shared words, for a provider whose peers store into them.
    pub fn words(&self) -> &LaneWords {
        &self.words
    }

    /// Generation in which lanes are first issued.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Dropped arrivals, by reason.
    pub fn dropped(&self) -> &DroppedArrivals {
        &self.dropped
    }
}

/// Zeroed words, whose pages take no memory before the first write.
fn zeroed(length: usize) -> Box<[AtomicU64]> {
    let words = Box::into_raw(vec![0u64; length].into_boxed_slice());
    // SAFETY: an AtomicU64 has the same size, alignment and bit validity as a u64; the box is owned here.
    unsafe { Box::from_raw(words as *mut [AtomicU64]) }
}

/// Increments a count; true at powers of two, which bounds the log lines that a misbehaving peer can
/// cause.
fn should_log(count: &AtomicU64) -> bool {
    (count.fetch_add(1, Ordering::Relaxed) + 1).is_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const ROUNDS: u64 = if cfg!(miri) { 20 } else { 2_000 };
    const BYTES: usize = 100;

    fn table() -> (LaneTable, Lane) {
        let table = LaneTable::new(4, Generation(1)).unwrap();
        let lane = table.issue(Rank(0), 2).unwrap();
        (table, lane)
    }

    /// Waits for a lane, in turns by polling and asleep; under miri by polling only, since rustix casts an
    /// integer to a pointer for futex.
    fn wait(table: &LaneTable, lane: Lane, round: u64) {
        let begin = Instant::now();
        while table.value(lane.id()) < round {
            assert!(begin.elapsed() < Duration::from_secs(30), "round {round} does not come");
            if round.is_multiple_of(3) && !cfg!(miri) {
                if table.prepare_sleep(SleepMode::Word) {
                    table.sleep_on_word(Duration::from_millis(50));
                    table.finish_sleep(SleepMode::Word);
                } else {
                    table.take_dirty(|_| {});
                }
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// A counted write and the credit for it between two threads at the same addresses, so that miri and
    /// ThreadSanitizer can track how accesses are ordered; across two mappings they cannot.
    #[test]
    fn bytes_are_complete_once_counted_and_stable_until_credited() {
        let ((owner, data), (writer, credit)) = (table(), table());
        let inbox = Memory::shared(BYTES).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    Memory::from_bytes([round as u8; BYTES]).copy_to(0, &inbox, 0, BYTES);
                    assert_eq!(owner.arrive(data), Some(Rank(0)));
                    wait(&writer, credit, round);
                }
            });
            for round in 1..=ROUNDS {
                wait(&owner, data, round);
                let mut seen = [0; BYTES];
                inbox.copy_out(0, &mut seen);
                assert_eq!(seen, [round as u8; BYTES]);
                assert!(writer.arrive_from(Rank(0), credit));
            }
        });
    }

    /// A transport that counts arrivals by peer can attribute late ones.
    #[test]
    fn a_block_is_issued_to_its_last_holder_unless_the_table_is_full() {
        let table = LaneTable::new(6, Generation(1)).unwrap();
        let blocks = [1, 2].map(|peer| table.issue(Rank(peer), 2).unwrap());
        blocks.iter().for_each(|block| table.release(*block, 2));
        assert_eq!(
            [1, 2].map(|at: usize| table.last_holder(blocks[at - 1])),
            [1, 2].map(|peer| Some(Rank(peer)))
        );
        assert_eq!(table.issue(Rank(1), 2).unwrap().id(), blocks[0].id());
        assert_eq!(table.last_holder(blocks[0]), Some(Rank(1)), "of the generation before");
        // Rank 3 takes fresh lanes, then rank 2's lanes; then the table is full.
        let third = table.issue(Rank(3), 2).unwrap();
        assert!(blocks.iter().all(|block| block.id() != third.id()));
        assert_eq!(table.issue(Rank(3), 2).unwrap().id(), blocks[1].id());
        assert!(matches!(table.issue(Rank(2), 2), Err(Error::Limit { .. })));
        assert_eq!(table.last_holder(Lane::from_immediate(u32::MAX)), None);
    }

    #[test]
    fn a_reissued_block_drops_late_arrivals_until_its_generations_are_used_up() {
        let table = LaneTable::new(4, Generation(7)).unwrap();
        let first = table.issue(Rank(1), 4).unwrap();
        assert_eq!(table.arrive(first), Some(Rank(1)));
        assert!(!table.arrive_from(Rank(2), first));
        table.release(first, 4);
        assert_eq!(table.arrive(first), None);
        let again = table.issue(Rank(2), 4).unwrap();
        assert_eq!((again.id(), again.generation()), (first.id(), Generation(8)));
        assert_eq!((table.arrive(first), table.value(first.id())), (None, 0));
        assert_eq!(table.arrive(again), Some(Rank(2)));
        assert!(matches!(table.issue(Rank(1), 2), Err(Error::Limit { wanted: 6, limit: 4, .. })));
        let dropped = table.dropped();
        let counts = [&dropped.ungranted, &dropped.stale].map(|n| n.load(Ordering::Relaxed));
        assert_eq!(counts, [2, 1]);
        let mut lane = again;
        for _ in 0..254 {
            table.release(lane, 4);
            lane = table.issue(Rank(1), 4).unwrap();
        }
        assert_eq!(lane.generation(), Generation(6));
        table.release(lane, 4);
        assert!(table.issue(Rank(1), 4).is_err());
    }
}
