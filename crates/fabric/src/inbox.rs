//! Inbox: submissions from threads that must not block on an engine's lock.
//!
//! A bounded lock-free queue that carries fixed-size descriptors, from many producers to the thread that
//! holds the engine. A GPU proxy and a query dispatcher push the same format.
//!
//! Each ring slot carries a sequence number (D. Vyukov's [bounded MPMC
//! queue](https://www.1024cores.net/home/lock-free-algorithms/queues/bounded-mpmc-queue)). A producer
//! claims the slot at the tail when the slot's sequence equals the tail, writes, and increments the
//! sequence; the consumer takes the slot at the head when the sequence is head + 1, and advances it by
//! the capacity.

use crate::atomics::{CacheLine, SharedCell, Word64};
use crate::error::{Error, Result};
use crate::types::{CounterId, Page, RegionKey};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use weft_control::Rank;

/// Inbox capacity.
pub(super) const DEPTH: usize = 1024;

/// One request in a fixed number of bytes: a write of `count` slices with `length` bytes each, at regular
/// distances, such as the rows of a matrix tile; a signal if the length is zero; or a credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct SubmissionDescriptor {
    /// Request kind.
    pub operation: SubmissionOperation,
    /// The peer written to.
    pub peer: Rank,
    /// The counter that is raised or credited.
    pub counter: CounterId,
    /// Slices; at least 1.
    pub count: u32,
    /// Round that the write belongs to.
    pub round: u64,
    /// The local region that is read.
    pub source: RegionKey,
    /// The peer's region that is written.
    pub destination: RegionKey,
    /// First byte read.
    pub source_offset: u64,
    /// Bytes from one slice read to the next.
    pub source_stride: u64,
    /// First byte written.
    pub destination_offset: u64,
    /// Bytes from one slice written to the next.
    pub destination_stride: u64,
    /// Bytes in each slice.
    pub length: u64,
    /// Tag returned with the outcome.
    pub tag: u64,
}

/// Operation that a [`SubmissionDescriptor`] requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum SubmissionOperation {
    /// Write slices and raise the peer's counter by the part count.
    Write = 1,
    /// Send the peer a credit for the oldest open round.
    Credit = 2,
}

/// Page repeated `count` times at regular strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedPages {
    /// The first slice.
    pub first: Page,
    /// Slices.
    pub count: u32,
    /// Bytes from one slice read to the next.
    pub source_stride: u64,
    /// Bytes from one slice written to the next.
    pub destination_stride: u64,
}

impl StridedPages {
    /// Slice limit.
    pub const MAX: u32 = 1 << 20;

    /// Appends a page for each slice. Offsets saturate at 64 bits, which is out of range.
    ///
    /// # Errors
    /// [`Error::Limit`] beyond [`StridedPages::MAX`]; `pages` is unchanged then.
    pub fn append_to(&self, pages: &mut Vec<Page>) -> Result<()> {
        if self.count > Self::MAX {
            let (wanted, limit) = (self.count.into(), Self::MAX.into());
            return Err(Error::Limit { what: "slices of one page", wanted, limit });
        }
        let at = |offset: u64, slice: u64, stride: u64| {
            offset.saturating_add(slice.saturating_mul(stride))
        };
        pages.extend((0..u64::from(self.count)).map(|slice| Page {
            source_offset: at(self.first.source_offset, slice, self.source_stride),
            destination_offset: at(self.first.destination_offset, slice, self.destination_stride),
            ..self.first
        }));
        Ok(())
    }
}

impl SubmissionDescriptor {
    /// Slices to write.
    pub(crate) fn slices(&self) -> StridedPages {
        let first = Page {
            source: self.source,
            source_offset: self.source_offset,
            destination: self.destination,
            destination_offset: self.destination_offset,
            length: self.length,
        };
        let (source_stride, destination_stride) = (self.source_stride, self.destination_stride);
        StridedPages { first, count: self.count, source_stride, destination_stride }
    }

    /// Writes `length` bytes.
    pub fn write(
        peer: Rank,
        counter: CounterId,
        round: u64,
        page: Page,
        tag: u64,
    ) -> SubmissionDescriptor {
        SubmissionDescriptor {
            operation: SubmissionOperation::Write,
            peer,
            counter,
            count: 1,
            round,
            source: page.source,
            destination: page.destination,
            source_offset: page.source_offset,
            source_stride: 0,
            destination_offset: page.destination_offset,
            destination_stride: 0,
            length: page.length,
            tag,
        }
    }

    /// A credit to `peer`.
    pub fn credit(peer: Rank, counter: CounterId, tag: u64) -> SubmissionDescriptor {
        let (operation, zero) = (SubmissionOperation::Credit, RegionKey(0));
        SubmissionDescriptor {
            operation,
            peer,
            counter,
            count: 1,
            round: 0,
            source: zero,
            destination: zero,
            source_offset: 0,
            source_stride: 0,
            destination_offset: 0,
            destination_stride: 0,
            length: 0,
            tag,
        }
    }
}

/// Callback for each submission's outcome, on the thread that makes progress: the tag, and the error if
/// it was rejected or failed. The engine is locked during the call; the callback may push to the inbox
/// and makes no other call.
pub type OutcomeCallback = dyn Fn(u64, Result<(), String>) + Send + Sync;

/// Descriptor with a pending outcome.
pub(crate) struct Submission {
    pub descriptor: SubmissionDescriptor,
    pub outcome: PendingOutcome,
}

/// Submission outcome, delivered once; on drop if the engine ends first.
pub(crate) struct PendingOutcome {
    pub(super) tag: u64,
    pub(super) outcomes: Option<Arc<OutcomeCallback>>,
}

impl PendingOutcome {
    pub fn deliver(&mut self, result: Result<(), String>) {
        if let Some(outcomes) = self.outcomes.take() {
            outcomes(self.tag, result);
        }
    }
}

impl Drop for PendingOutcome {
    fn drop(&mut self) {
        self.deliver(Err("the communicator was closed before the submission had ended".into()));
    }
}

/// Submission queue in front of a [`SharedEngine`].
#[derive(Default)]
pub(crate) struct Inbox {
    /// Allocated for the first [`Submitter`]: about 90 KiB, and a process may have thousands of pairs.
    ring: OnceLock<Ring<Submission, AtomicU64>>,
    used: AtomicBool,
}

impl Inbox {
    /// Prepares for a [`Submitter`].
    pub fn open(&self) {
        self.ring();
        self.used.store(true, Ordering::SeqCst);
    }

    pub(super) fn ring(&self) -> &Ring<Submission, AtomicU64> {
        self.ring.get_or_init(|| Ring::new(DEPTH))
    }

    /// True once a [`Submitter`] was made.
    pub fn is_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    pub fn is_empty(&self) -> bool {
        self.ring.get().is_none_or(Ring::is_empty)
    }

    /// Takes all submissions. The caller holds the engine's lock, so it is the only consumer.
    pub fn drain(&self, mut take: impl FnMut(Submission)) {
        if !self.is_used() {
            return;
        }
        let Some(ring) = self.ring.get() else { return };
        while let Some(submission) = ring.take() {
            take(submission);
        }
    }
}

/// Tail bit that closes the ring. No slot has such a sequence number, so every claim fails.
const CLOSED: u64 = 1 << 63;

/// Bounded multi-producer queue with one consumer at a time.
pub struct Ring<T, W: Word64> {
    /// Next slot to claim.
    tail: CacheLine<W>,
    /// Next slot to take; written by the consumer only.
    head: CacheLine<W>,
    slots: Box<[RingSlot<T, W>]>,
}

struct RingSlot<T, W> {
    sequence: W,
    item: SharedCell<MaybeUninit<T>>,
}

// SAFETY: an item is moved in by the thread that claimed the slot and out by the consumer, each while the
// sequence number gives that thread exclusive access to the slot.
unsafe impl<T: Send, W: Word64> Send for Ring<T, W> {}
// SAFETY: as above.
unsafe impl<T: Send, W: Word64> Sync for Ring<T, W> {}

impl<T, W: Word64> Ring<T, W> {
    /// Makes a ring for `capacity` items, rounded up to a power of two, at least two.
    pub fn new(capacity: usize) -> Ring<T, W> {
        let capacity = capacity.next_power_of_two().max(2) as u64;
        let slot = |sequence| RingSlot {
            sequence: W::new(sequence),
            item: SharedCell::new(MaybeUninit::uninit()),
        };
        Ring {
            tail: CacheLine(W::new(0)),
            head: CacheLine(W::new(0)),
            slots: (0..capacity).map(slot).collect(),
        }
    }

    fn slot(&self, index: u64) -> &RingSlot<T, W> {
        &self.slots[(index & (self.slots.len() as u64 - 1)) as usize]
    }

    /// Puts an item, or returns it if the ring is full or closed. Any thread.
    pub fn put(&self, item: T) -> Result<(), T> {
        let mut tail = self.tail.0.load();
        loop {
            let slot = self.slot(tail);
            match slot.sequence.load() {
                sequence if sequence == tail => {
                    if self.tail.0.replace(tail, tail + 1) {
                        // SAFETY: the slot's sequence was the tail, and this thread won the tail claim.
                        slot.item.with_mut(|slot| unsafe { (*slot).write(item) });
                        slot.sequence.store(tail + 1);
                        return Ok(());
                    }
                    tail = self.tail.0.load();
                }
                sequence if sequence < tail => return Err(item),
                _ => tail = self.tail.0.load(),
            }
        }
    }

    /// Takes the oldest item. One thread at a time.
    pub fn take(&self) -> Option<T> {
        let head = self.head.0.load();
        let slot = self.slot(head);
        if slot.sequence.load() != head + 1 {
            return None;
        }
        // SAFETY: the sequence is raised after the item was written, and the only consumer reads it once.
        let item = slot.item.with_mut(|slot| unsafe { (*slot).assume_init_read() });
        slot.sequence.store(head + self.slots.len() as u64);
        self.head.0.store(head + 1);
        Some(item)
    }

    /// Calls `visit` with each item in place, the oldest first. By the thread that takes.
    pub fn for_each(&self, mut visit: impl FnMut(&mut T)) {
        let head = self.head.0.load();
        for position in head..head + self.slots.len() as u64 {
            let slot = self.slot(position);
            if slot.sequence.load() != position + 1 {
                return;
            }
            // SAFETY: the sequence is raised after the item was written; until the only consumer takes the item, the
            // slot belongs to that consumer.
            slot.item.with_mut(|slot| visit(unsafe { (*slot).assume_init_mut() }));
        }
    }

    /// Refuses all further items. Any thread.
    pub fn close(&self) {
        self.tail.0.fetch_or(CLOSED);
    }

    /// True if the ring is closed, and every item that was accepted was taken.
    pub fn is_drained(&self) -> bool {
        self.tail.0.load() == self.head.0.load() | CLOSED
    }

    /// True without items.
    pub fn is_empty(&self) -> bool {
        let head = self.head.0.load();
        self.slot(head).sequence.load() != head + 1
    }
}

impl<T, W: Word64> Drop for Ring<T, W> {
    fn drop(&mut self) {
        while self.take().is_some() {}
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn it_fills_empties_and_wraps() {
        let ring = Ring::<u32, AtomicU64>::new(4);
        for round in 0..10 {
            assert!(ring.is_empty());
            (0..4).for_each(|item| ring.put(10 * round + item).unwrap());
            assert_eq!(ring.put(99), Err(99));
            (0..4).for_each(|item| assert_eq!(ring.take(), Some(10 * round + item)));
            assert_eq!(ring.take(), None);
        }
    }

    #[test]
    fn items_are_visited_in_place_and_in_order() {
        let ring = Ring::<u32, AtomicU64>::new(4);
        (0..3).for_each(|item| ring.put(item).unwrap());
        assert_eq!(ring.take(), Some(0));
        (3..5).for_each(|item| ring.put(item).unwrap());
        let mut seen = Vec::new();
        ring.for_each(|item| {
            seen.push(*item);
            *item += 10;
        });
        assert_eq!(seen, [1, 2, 3, 4]);
        (11..15).for_each(|item| assert_eq!(ring.take(), Some(item)));
        ring.for_each(|item| panic!("{item}"));
    }

    #[test]
    fn a_closed_ring_refuses_items_and_has_those_before() {
        let ring = Ring::<u32, AtomicU64>::new(4);
        ring.put(1).unwrap();
        assert!(!ring.is_drained());
        ring.close();
        assert_eq!(ring.put(2), Err(2));
        assert!(!ring.is_drained());
        assert_eq!((ring.take(), ring.take()), (Some(1), None));
        assert!(ring.is_drained());
    }

    #[test]
    fn items_left_are_dropped_once() {
        let item = Arc::new(());
        let ring = Ring::<_, AtomicU64>::new(4);
        (0..3).for_each(|_| ring.put(item.clone()).unwrap());
        drop(ring.take());
        assert_eq!(Arc::strong_count(&item), 3);
        drop(ring);
        assert_eq!(Arc::strong_count(&item), 1);
    }

    #[test]
    fn items_of_each_thread_are_taken_once_and_in_order() {
        let many: u64 = if cfg!(miri) { 40 } else { 20_000 };
        let ring = Ring::<(usize, u64), AtomicU64>::new(8);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let ring = &ring;
                scope.spawn(move || {
                    for number in 0..many {
                        while ring.put((thread, number)).is_err() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut next = [0; 3];
            while next != [many; 3] {
                match ring.take() {
                    Some((thread, number)) => {
                        assert_eq!(number, next[thread]);
                        next[thread] += 1;
                    }
                    None => std::thread::yield_now(),
                }
            }
        });
        assert!(ring.is_empty());
    }
}
