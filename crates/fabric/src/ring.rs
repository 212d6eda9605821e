//! A bounded queue from one thread to one other, without locks.
//!
//! Each side owns its index, on its own cache line, and keeps a copy of the other's, which it reads
//! again only when the copy says that the ring is full or empty. An item is written before the tail is
//! released, and read before the head is.

use crate::atomics::{Arc, Line, Place, Word64};
use std::mem::MaybeUninit;
use std::sync::atomic::AtomicU64;

struct Shared<T, W: Word64> {
    /// Items ever taken. The consumer's.
    head: Line<W>,
    /// Items ever put. The producer's.
    tail: Line<W>,
    places: Box<[Place<MaybeUninit<T>>]>,
}

// SAFETY: an item is moved in by one thread and out by another, each while it alone holds the place.
unsafe impl<T: Send, W: Word64> Send for Shared<T, W> {}
// SAFETY: as above; the indices say who holds which place.
unsafe impl<T: Send, W: Word64> Sync for Shared<T, W> {}

/// The end that puts.
pub struct Producer<T, W: Word64 = AtomicU64> {
    shared: Arc<Shared<T, W>>,
    tail: u64,
    /// The head when last looked at.
    head: u64,
}

/// The end that takes.
pub struct Consumer<T, W: Word64 = AtomicU64> {
    shared: Arc<Shared<T, W>>,
    head: u64,
    /// The tail when last looked at.
    tail: u64,
}

/// The two ends of a ring for `capacity` items, rounded up to a power of two.
pub fn ring<T: Send, W: Word64>(capacity: usize) -> (Producer<T, W>, Consumer<T, W>) {
    let places =
        (0..capacity.next_power_of_two()).map(|_| Place::new(MaybeUninit::uninit())).collect();
    let (head, tail) = (Line(W::new(0)), Line(W::new(0)));
    let shared = Arc::new(Shared { head, tail, places });
    let producer = Producer { shared: shared.clone(), tail: 0, head: 0 };
    (producer, Consumer { shared, head: 0, tail: 0 })
}

impl<T, W: Word64> Shared<T, W> {
    fn capacity(&self) -> u64 {
        self.places.len() as u64
    }

    fn place(&self, index: u64) -> &Place<MaybeUninit<T>> {
        &self.places[(index & (self.capacity() - 1)) as usize]
    }
}

impl<T: Send, W: Word64> Producer<T, W> {
    /// Whether [`Producer::put`] would be refused.
    pub fn is_full(&mut self) -> bool {
        if self.tail - self.head < self.shared.capacity() {
            return false;
        }
        self.head = self.shared.head.0.load();
        self.tail - self.head == self.shared.capacity()
    }

    /// Puts an item, or gives it back if the ring is full.
    pub fn put(&mut self, item: T) -> Result<(), T> {
        if self.is_full() {
            return Err(item);
        }
        // SAFETY: the place is beyond the tail and was left by the consumer, whose head we acquired.
        self.shared.place(self.tail).with_mut(|place| unsafe { (*place).write(item) });
        self.tail += 1;
        self.shared.tail.0.store(self.tail);
        Ok(())
    }
}

impl<T: Send, W: Word64> Consumer<T, W> {
    /// Takes the oldest item.
    pub fn take(&mut self) -> Option<T> {
        if self.head == self.tail {
            self.tail = self.shared.tail.0.load();
            if self.head == self.tail {
                return None;
            }
        }
        let place = self.shared.place(self.head);
        // SAFETY: the producer wrote this place before the tail that we acquired, and leaves it alone
        // until it acquires the head that we release below. It is read once.
        let item = place.with_mut(|place| unsafe { (*place).assume_init_read() });
        self.head += 1;
        self.shared.head.0.store(self.head);
        Some(item)
    }
}

impl<T, W: Word64> Drop for Shared<T, W> {
    fn drop(&mut self) {
        for index in self.head.0.load()..self.tail.0.load() {
            // SAFETY: both ends are gone; what was put and not taken is whole.
            self.place(index).with_mut(|place| unsafe { (*place).assume_init_drop() });
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn it_fills_empties_and_wraps() {
        let (mut producer, mut consumer) = ring::<u32, AtomicU64>(4);
        for round in 0..10 {
            assert!(consumer.take().is_none());
            (0..4).for_each(|item| producer.put(10 * round + item).unwrap());
            assert!(producer.is_full());
            assert_eq!(producer.put(99), Err(99));
            (0..4).for_each(|item| assert_eq!(consumer.take(), Some(10 * round + item)));
        }
    }

    #[test]
    fn what_was_not_taken_is_dropped_once() {
        let item = Arc::new(());
        let (mut producer, mut consumer) = ring::<_, AtomicU64>(4);
        (0..3).for_each(|_| producer.put(item.clone()).unwrap());
        drop(consumer.take());
        drop(consumer);
        producer.put(item.clone()).unwrap();
        assert_eq!(Arc::strong_count(&item), 4);
        drop(producer);
        assert_eq!(Arc::strong_count(&item), 1);
    }

    #[test]
    fn everything_crosses_in_order() {
        let many = if cfg!(miri) { 100 } else { 20_000 };
        let (mut producer, mut consumer) = ring::<_, AtomicU64>(8);
        let taker = std::thread::spawn(move || {
            for expected in 0..many {
                let item: Box<u32> = loop {
                    match consumer.take() {
                        Some(item) => break item,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(*item, expected);
            }
        });
        for item in 0..many {
            let mut item = Box::new(item);
            while let Err(back) = producer.put(item) {
                item = back;
                std::thread::yield_now();
            }
        }
        taker.join().unwrap();
    }
}
