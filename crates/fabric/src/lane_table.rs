//! The lanes of one engine: which are granted to whom, and the memory in which they rise.

use crate::atomics::Line;
use crate::error::{Error, Result};
use crate::lanes::{Lanes, Sleep, Wake};
use crate::memory::Memory;
use crate::types::{Generation, Lane, LaneId};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use weft_control::Rank;

/// The shared words of a lane table, this engine's own or a mapped peer's.
#[derive(Debug)]
pub struct LaneWords {
    memory: Arc<Memory>,
    capacity: usize,
    leaves: usize,
    /// Lines of two words.
    pairs: usize,
}

const LINE: usize = size_of::<Line<AtomicU64>>();

impl LaneWords {
    /// Bytes that a table of `capacity` lanes takes: a line for the bell, one for each leaf, one for each
    /// two words.
    pub fn bytes_for(capacity: usize) -> usize {
        LINE * (1 + capacity.div_ceil(64) + capacity.div_ceil(2))
    }

    /// A view of `memory` as a table of `capacity` lanes, or `None` if it is too small for one.
    pub fn new(memory: Arc<Memory>, capacity: usize) -> Option<LaneWords> {
        let aligned = memory.host()?.as_ptr().addr().is_multiple_of(align_of::<Line<AtomicU64>>());
        let fits = capacity <= LaneId::LIMIT as usize && Self::bytes_for(capacity) <= memory.len();
        let (leaves, pairs) = (capacity.div_ceil(64), capacity.div_ceil(2));
        (aligned && fits).then_some(LaneWords { memory, capacity, leaves, pairs })
    }

    /// The words.
    #[inline]
    pub fn lanes(&self) -> Lanes<'_, AtomicU32, AtomicU64> {
        let base = self.memory.host().expect("checked at construction").as_ptr();
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
        // The counter of an eventfd cannot overflow by ones before it is read.
        Wake::Descriptor => drop(rustix::io::write(descriptor, &1u64.to_ne_bytes())),
    }
}

/// Arrivals that named a lane wrongly, by reason. They are dropped.
#[derive(Debug, Default)]
pub struct Refused {
    /// A lane that was never issued, or to somebody else.
    pub ungranted: AtomicU64,
    /// A lane of another generation.
    pub stale: AtomicU64,
}

/// The owner's table.
#[derive(Debug)]
pub struct LaneTable {
    words: LaneWords,
    generation: Generation,
    issued: AtomicU32,
    /// To which rank each lane is granted, plus one.
    granted: Box<[AtomicU32]>,
    wake: OwnedFd,
    refused: Refused,
}

impl LaneTable {
    /// An empty table.
    pub fn new(capacity: usize, generation: Generation) -> Result<LaneTable> {
        let memory = Arc::new(Memory::shared(LaneWords::bytes_for(capacity))?);
        let words = LaneWords::new(memory, capacity).ok_or(Error::Limit {
            what: "lanes in one engine",
            wanted: capacity as u64,
            limit: LaneId::LIMIT.into(),
        })?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("cannot create an event descriptor", e))?;
        let granted = (0..capacity).map(|_| AtomicU32::new(0)).collect();
        Ok(LaneTable {
            words,
            generation,
            issued: AtomicU32::new(0),
            granted,
            wake,
            refused: Refused::default(),
        })
    }

    /// Issues a lane to `peer`. Every second one shares a cache line with the one before it, so issue
    /// two at a time to a peer.
    pub fn issue(&self, peer: Rank) -> Result<Lane> {
        let number = self.issued.fetch_add(1, Ordering::Relaxed);
        let Some(granted) = self.granted.get(number as usize) else {
            self.issued.fetch_sub(1, Ordering::Relaxed);
            return Err(Error::Limit {
                what: "lanes in one engine",
                wanted: u64::from(number) + 1,
                limit: self.granted.len() as u64,
            });
        };
        granted.store(peer.0 + 1, Ordering::Release);
        let id = LaneId::new(number).expect("the capacity is below the limit");
        Ok(Lane::new(id, self.generation))
    }

    /// Raises a lane by one on behalf of `peer`, whose agent the caller is: one thread at a time.
    /// An arrival that names a lane wrongly is dropped and counted; returns whether it was right.
    pub fn arrive(&self, peer: Rank, lane: Lane) -> bool {
        let number = lane.id().get() as usize;
        let granted = self.granted.get(number).map(|g| g.load(Ordering::Acquire));
        if granted != Some(peer.0 + 1) {
            if is_worth_a_line(&self.refused.ungranted) {
                log::warn!("dropped an arrival from {peer}: lane {number} is not granted to it");
            }
            return false;
        }
        if lane.generation() != self.generation {
            if is_worth_a_line(&self.refused.stale) {
                log::warn!(
                    "dropped an arrival from {peer}: lane {number} of generation {}, this is {}",
                    lane.generation().0,
                    self.generation.0
                );
            }
            return false;
        }
        let lanes = self.words.lanes();
        let asleep = lanes.raise(number, lanes.value(number) + 1);
        wake(lanes, asleep, self.wake.as_fd());
        true
    }

    /// Wakes the owner without a raise.
    pub fn nudge(&self) {
        let lanes = self.words.lanes();
        wake(lanes, lanes.nudge(), self.wake.as_fd());
    }

    /// The lane's value.
    pub fn value(&self, id: LaneId) -> u64 {
        self.words.lanes().value(id.get() as usize)
    }

    /// Owner: see [`Lanes::take_raised`].
    pub fn take_raised(&self, pending: &mut u32, rose: impl FnMut(usize)) -> bool {
        self.words.lanes().take_raised(pending, rose)
    }

    /// Owner: sleeps on the bell word until something rises, is nudged, or `timeout` is over.
    pub fn sleep_on_word(&self, pending: &mut u32, timeout: Duration) {
        let lanes = self.words.lanes();
        if lanes.prepare_sleep(pending, Sleep::Word) {
            lanes.sleep_on_word(timeout);
        }
        lanes.finish_sleep(pending);
    }

    /// Owner: announces that it will sleep on [`LaneTable::descriptor`]; whether it may.
    pub fn prepare_sleep_on_descriptor(&self, pending: &mut u32) -> bool {
        self.words.lanes().prepare_sleep(pending, Sleep::Descriptor)
    }

    /// Owner: ends what [`LaneTable::prepare_sleep_on_descriptor`] began and clears the descriptor.
    pub fn finish_sleep_on_descriptor(&self, pending: &mut u32) {
        self.words.lanes().finish_sleep(pending);
        let mut count = [0; 8];
        // Empty is the usual case: somebody else woke us.
        let _ = rustix::io::read(&self.wake, &mut count);
    }

    /// Becomes readable when a raise finds the owner asleep on it.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// The shared words, for a provider that lets peers store into them.
    pub fn words(&self) -> &LaneWords {
        &self.words
    }

    /// The generation of every lane in this table.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// What was dropped.
    pub fn refused(&self) -> &Refused {
        &self.refused
    }
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
        let lane = table.issue(Rank(0)).unwrap();
        (table, lane)
    }

    /// Waits for a lane now by looking, now asleep; under miri by looking only, as rustix makes a pointer
    /// of a number to call futex.
    fn wait(table: &LaneTable, lane: Lane, round: u64) {
        let (begin, mut pending) = (Instant::now(), 0);
        while table.value(lane.id()) < round {
            assert!(begin.elapsed() < Duration::from_secs(30), "round {round} does not come");
            if round.is_multiple_of(3) && !cfg!(miri) {
                table.sleep_on_word(&mut pending, Duration::from_millis(50));
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
                    assert!(owner.arrive(Rank(0), data));
                    wait(&writer, credit, round);
                }
            });
            for round in 1..=ROUNDS {
                wait(&owner, data, round);
                let mut seen = [0; BYTES];
                inbox.copy_out(0, &mut seen);
                assert_eq!(seen, [round as u8; BYTES]);
                assert!(writer.arrive(Rank(0), credit));
            }
        });
    }
}
