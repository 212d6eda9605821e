//! The lanes of one engine: which are granted to whom, and the memory in which they rise.

use crate::atomics::Line;
use crate::error::{Error, Result};
use crate::lanes::{Lanes, Sleep, Wake};
use crate::memory::Memory;
use crate::types::{Generation, Lane, LaneId};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weft_control::Rank;

/// The shared words of a lane table, this engine's own or a mapped peer's.
#[derive(Debug)]
pub struct LaneWords {
    memory: Arc<Memory>,
    /// Its first byte.
    base: NonNull<u8>,
    capacity: usize,
    leaves: usize,
    /// Lines of two words.
    pairs: usize,
}

// SAFETY: `base` points into `memory`, which is Send; the words are only ever accessed atomically.
unsafe impl Send for LaneWords {}
// SAFETY: as above.
unsafe impl Sync for LaneWords {}

const LINE: usize = size_of::<Line<AtomicU64>>();

impl LaneWords {
    /// Bytes that a table of `capacity` lanes takes: a line for the bell, one for each leaf, one for each
    /// two words.
    pub fn bytes_for(capacity: usize) -> usize {
        LINE * (1 + capacity.div_ceil(64) + capacity.div_ceil(2))
    }

    /// A view of `memory` as a table of `capacity` lanes, or `None` if it is too small for one.
    pub fn new(memory: Arc<Memory>, capacity: usize) -> Option<LaneWords> {
        let base = memory.host()?;
        let aligned = base.as_ptr().addr().is_multiple_of(align_of::<Line<AtomicU64>>());
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
                bell: &*line(0).cast::<Line<AtomicU32>>(),
                leaves: std::slice::from_raw_parts(line(1).cast(), self.leaves),
                words: std::slice::from_raw_parts(line(1 + self.leaves).cast(), self.pairs),
            }
        }
    }

    /// A lane's value, with all that its agent wrote before it.
    ///
    /// # Panics
    /// If there is no such lane.
    #[inline(always)]
    pub fn value(&self, lane: usize) -> u64 {
        assert!(lane < self.capacity);
        let base = self.base;
        // SAFETY: as in `lanes`; lane words lie two to a line behind the bell and the leaves.
        let word = unsafe {
            let line = base.as_ptr().add((1 + self.leaves + lane / 2) * LINE);
            &*line.cast::<AtomicU64>().add(lane % 2)
        };
        word.load(Ordering::Acquire)
    }

    /// Number of lanes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The memory, to share it.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

/// Does what a raise asked for.
pub fn wake(lanes: Lanes<'_, AtomicU32, AtomicU64>, wake: Wake, descriptor: BorrowedFd<'_>) {
    use crate::atomics::Word32;
    match wake {
        Wake::No => {}
        Wake::Word => lanes.bell.0.wake(),
        Wake::Descriptor => signal(descriptor),
        Wake::WordAndDescriptor => {
            lanes.bell.0.wake();
            signal(descriptor);
        }
    }
}

fn signal(descriptor: BorrowedFd<'_>) {
    // The counter of an eventfd cannot overflow by ones before it is read.
    let _ = rustix::io::write(descriptor, &1u64.to_ne_bytes());
}

/// Arrivals that named a lane wrongly, by reason. They are dropped.
#[derive(Debug, Default)]
pub struct Refused {
    /// A lane that is free, or issued to another peer.
    pub ungranted: AtomicU64,
    /// A lane of another generation.
    pub stale: AtomicU64,
}

/// The owner's table.
#[derive(Debug)]
pub struct LaneTable {
    words: LaneWords,
    generation: Generation,
    /// To whom each lane is granted, and in which generation: see [`Holder`].
    holders: Box<[AtomicU64]>,
    blocks: Mutex<Blocks>,
    wake: OwnedFd,
    refused: Refused,
}

/// A lane's holder in one word: the rank plus one above the generation, zero for a lane that was never
/// issued. The top bit marks a lane that was taken back.
struct Holder;

impl Holder {
    const FREE: u64 = 1 << 63;

    fn of(peer: Rank, generation: Generation) -> u64 {
        (u64::from(peer.0) + 1) << 8 | u64::from(generation.0)
    }

    fn peer(word: u64) -> Option<Rank> {
        if word & Holder::FREE == 0 { Holder::last_peer(word) } else { None }
    }

    /// Also of a lane that was taken back.
    fn last_peer(word: u64) -> Option<Rank> {
        ((word & !Holder::FREE) >> 8).checked_sub(1).map(|rank| Rank(rank as u32))
    }

    fn generation(word: u64) -> Generation {
        Generation(word as u8)
    }
}

/// Lanes by blocks: those never issued, and those that were given back, by the length of their block and
/// the peer that they were issued to.
#[derive(Debug, Default)]
struct Blocks {
    issued: u32,
    free: HashMap<(u32, Rank), Vec<Lane>>,
}

impl Blocks {
    /// A block that was given back by its last holder, so that late arrivals on it are known to be this
    /// peer's.
    fn take_own(&mut self, peer: Rank, count: u32) -> Option<Lane> {
        self.free.get_mut(&(count, peer))?.pop()
    }

    /// A block that any peer gave back, for a table that is full.
    fn take_any(&mut self, count: u32) -> Option<Lane> {
        let mut fitting = self.free.iter_mut().filter(|((length, _), _)| *length == count);
        fitting.find_map(|(_, blocks)| blocks.pop())
    }
}

impl LaneTable {
    /// An empty table. Lanes that are never issued take no memory.
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
        let (blocks, refused) = (Mutex::default(), Refused::default());
        Ok(LaneTable { words, generation, holders, blocks, wake, refused })
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Issues `count` lanes in a row to `peer`, all at zero; returns the first. Lanes 2i and 2i+1 share a
    /// cache line, so `count` is even. A block of lanes that was given back is issued again in the next
    /// generation, to the same peer while there are others.
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
            self.holders[number].store(Holder::of(peer, first.generation()), Ordering::Release);
        }
        Ok(first)
    }

    /// Takes a block of lanes back, which no peer raises any more: later arrivals that name them are
    /// dropped and counted. After 256 generations a block is retired.
    pub fn release(&self, first: Lane, count: u32) {
        let next = Generation(first.generation().0.wrapping_add(1));
        let renewed = (next != self.generation).then_some(Lane::new(first.id(), next));
        self.take_back(first, count, renewed);
    }

    /// Takes a block of lanes back that was granted to no peer: it is issued again in the same generation.
    pub fn cancel(&self, first: Lane, count: u32) {
        self.take_back(first, count, Some(first));
    }

    fn take_back(&self, first: Lane, count: u32, renewed: Option<Lane>) {
        let begin = first.id().get() as usize;
        for number in begin..begin + count as usize {
            self.holders[number].fetch_or(Holder::FREE, Ordering::AcqRel);
        }
        if let (Some(renewed), Some(peer)) = (renewed, self.last_holder(first)) {
            self.blocks().free.entry((count, peer)).or_default().push(renewed);
        }
    }

    /// Raises a lane by one. The caller is the agent of the lane's holder, one thread at a time. Returns
    /// the holder. An arrival that names a free lane or another generation is dropped and counted.
    pub fn arrive(&self, lane: Lane) -> Option<Rank> {
        let peer = self.arrive_unmarked(lane)?;
        self.mark(lane.id());
        Some(peer)
    }

    /// [`LaneTable::arrive`] inside of [`crate::Link::poll`]: the link reports the lane in its
    /// [`crate::link::Sink`], so no mark is set. The engine takes the lane next and passes it on to the threads
    /// and the event loop that sleep.
    #[inline]
    pub fn arrive_unmarked(&self, lane: Lane) -> Option<Rank> {
        let number = lane.id().get() as usize;
        let word = self.holders.get(number).map_or(0, |holder| holder.load(Ordering::Acquire));
        let holder = Holder::peer(word).filter(|_| lane.generation() == Holder::generation(word));
        if holder.is_none() {
            self.refuse(lane, word);
            return None;
        }
        let lanes = self.words.lanes();
        lanes.raise_unmarked(number, lanes.value(number) + 1);
        holder
    }

    /// Marks a lane that rose by [`LaneTable::arrive_unmarked`], and wakes the owner.
    pub fn mark(&self, lane: LaneId) {
        let lanes = self.words.lanes();
        wake(lanes, lanes.mark(lane.get() as usize), self.wake.as_fd());
    }

    /// Counts an arrival that is dropped; `word` is its lane's holder.
    #[cold]
    #[inline(never)]
    fn refuse(&self, lane: Lane, word: u64) {
        let number = lane.id().get();
        if Holder::peer(word).is_none() {
            if is_worth_a_line(&self.refused.ungranted) {
                log::warn!("dropped an arrival: lane {number} is not granted");
            }
        } else if is_worth_a_line(&self.refused.stale) {
            log::warn!(
                "dropped an arrival: lane {number} of generation {}, this is {}",
                lane.generation().0,
                Holder::generation(word).0
            );
        }
    }

    /// The peer to which a lane was last issued, for a transport that counts arrivals by peer. `None` for a
    /// lane that was never issued.
    pub fn last_holder(&self, lane: Lane) -> Option<Rank> {
        let word = self.holders.get(lane.id().get() as usize)?.load(Ordering::Acquire);
        Holder::last_peer(word)
    }

    /// [`LaneTable::arrive`] for a transport that knows the sender: a lane granted to another peer is
    /// dropped and counted, too. Returns whether the lane rose.
    pub fn arrive_from(&self, peer: Rank, lane: Lane) -> bool {
        self.is_open_to(peer, lane) && self.arrive(lane).is_some()
    }

    /// [`LaneTable::arrive_unmarked`] for such a transport.
    pub fn arrive_from_unmarked(&self, peer: Rank, lane: Lane) -> Option<Rank> {
        if self.is_open_to(peer, lane) { self.arrive_unmarked(lane) } else { None }
    }

    /// Whether a lane is granted to no other peer than this one; counts an arrival that is refused.
    fn is_open_to(&self, peer: Rank, lane: Lane) -> bool {
        let number = lane.id().get() as usize;
        let word = self.holders.get(number).map_or(0, |holder| holder.load(Ordering::Acquire));
        if Holder::peer(word).is_some_and(|holder| holder != peer) {
            if is_worth_a_line(&self.refused.ungranted) {
                log::warn!("dropped an arrival from {peer}: lane {number} is not granted to it");
            }
            return false;
        }
        true
    }

    /// Wakes the owner without a raise.
    pub fn nudge(&self) {
        let lanes = self.words.lanes();
        wake(lanes, lanes.nudge(), self.wake.as_fd());
    }

    /// The lane's value.
    #[inline(always)]
    pub fn value(&self, id: LaneId) -> u64 {
        self.words.value(id.get() as usize)
    }

    /// Owner: see [`Lanes::has_raised`].
    #[inline(always)]
    pub fn has_raised(&self) -> bool {
        self.words.lanes().has_raised()
    }

    /// Owner: see [`Lanes::take_raised`].
    pub fn take_raised(&self, rose: impl FnMut(usize)) -> bool {
        self.words.lanes().take_raised(rose)
    }

    /// Owner: see [`Lanes::prepare_sleep`].
    pub fn prepare_sleep(&self, how: Sleep) -> bool {
        self.words.lanes().prepare_sleep(how)
    }

    /// Owner: sleeps on the bell word until something rises, is nudged, or `timeout` is over. Follows a
    /// [`LaneTable::prepare_sleep`] that returned `true`.
    pub fn sleep_on_word(&self, timeout: Duration) {
        self.words.lanes().sleep_on_word(timeout);
    }

    /// Owner: ends what [`LaneTable::prepare_sleep`] began. Clears the descriptor when no other sleeper
    /// needs it.
    pub fn finish_sleep(&self, how: Sleep) {
        if self.words.lanes().finish_sleep(how) && how != Sleep::Word {
            let mut count = [0; 8];
            // Empty is the usual case: another descriptor became readable.
            let _ = rustix::io::read(&self.wake, &mut count);
        }
    }

    /// Becomes readable when a raise finds the owner asleep on it.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// The shared words, for a provider that lets peers store into them.
    pub fn words(&self) -> &LaneWords {
        &self.words
    }

    /// The generation in which lanes are first issued.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// What was dropped.
    pub fn refused(&self) -> &Refused {
        &self.refused
    }
}

/// Words at zero, whose pages take no memory before they are written.
fn zeroed(length: usize) -> Box<[AtomicU64]> {
    let words = Box::into_raw(vec![0u64; length].into_boxed_slice());
    // SAFETY: an AtomicU64 has the size, alignment and bit validity of a u64; the box is owned here.
    unsafe { Box::from_raw(words as *mut [AtomicU64]) }
}

/// Counts one more, and says whether it is the first, second, fourth, eighth...: whoever goes on saying
/// wrong things fills nobody's log.
fn is_worth_a_line(count: &AtomicU64) -> bool {
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

    /// Waits for a lane now by looking, now asleep; under miri by looking only, as rustix makes a pointer
    /// of a number to call futex.
    fn wait(table: &LaneTable, lane: Lane, round: u64) {
        let begin = Instant::now();
        while table.value(lane.id()) < round {
            assert!(begin.elapsed() < Duration::from_secs(30), "round {round} does not come");
            if round.is_multiple_of(3) && !cfg!(miri) {
                if table.prepare_sleep(Sleep::Word) {
                    table.sleep_on_word(Duration::from_millis(50));
                    table.finish_sleep(Sleep::Word);
                } else {
                    table.take_raised(|_| {});
                }
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// A counted write and its credit between two threads that see the same addresses, so that miri and
    /// ThreadSanitizer know what orders the bytes. Between two mappings of one memory they cannot.
    #[test]
    fn bytes_are_whole_once_counted_and_left_alone_until_credited() {
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

    /// So a transport that counts arrivals by peer knows whose a late one is.
    #[test]
    fn a_block_goes_to_its_last_holder_again_unless_the_table_is_full() {
        let table = LaneTable::new(6, Generation(1)).unwrap();
        let blocks = [1, 2].map(|peer| table.issue(Rank(peer), 2).unwrap());
        blocks.iter().for_each(|block| table.release(*block, 2));
        assert_eq!(
            [1, 2].map(|at: usize| table.last_holder(blocks[at - 1])),
            [1, 2].map(|peer| Some(Rank(peer)))
        );
        assert_eq!(table.issue(Rank(1), 2).unwrap().id(), blocks[0].id());
        assert_eq!(table.last_holder(blocks[0]), Some(Rank(1)), "of the generation before");
        // Rank 3 takes lanes that no one had, then those of rank 2, and then there are none.
        let third = table.issue(Rank(3), 2).unwrap();
        assert!(blocks.iter().all(|block| block.id() != third.id()));
        assert_eq!(table.issue(Rank(3), 2).unwrap().id(), blocks[1].id());
        assert!(matches!(table.issue(Rank(2), 2), Err(Error::Limit { .. })));
        assert_eq!(table.last_holder(Lane::from_immediate(u32::MAX)), None);
    }

    #[test]
    fn a_block_that_is_issued_again_drops_late_arrivals_until_its_generations_are_used_up() {
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
        let refused = table.refused();
        let counts = [&refused.ungranted, &refused.stale].map(|n| n.load(Ordering::Relaxed));
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
