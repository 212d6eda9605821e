//! Every interleaving of a producer and a consumer.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p weft-fabric --release --test loom_ring`
#![cfg(loom)]

use loom::sync::atomic::{AtomicU64, Ordering};
use weft_fabric::atomics::Word64;
use weft_fabric::ring::ring;

struct Word(AtomicU64);

impl Word64 for Word {
    fn new(value: u64) -> Word {
        Word(AtomicU64::new(value))
    }
    fn load(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
    fn store(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }
    fn swap(&self, value: u64) -> u64 {
        self.0.swap(value, Ordering::AcqRel)
    }
    fn fetch_or(&self, bits: u64) -> u64 {
        self.0.fetch_or(bits, Ordering::AcqRel)
    }
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn all_items_cross_in_order_through_full_and_empty() {
    const ITEMS: usize = 4;
    check(|| {
        let (mut producer, mut consumer) = ring::<Box<usize>, Word>(2);
        let thread = loom::thread::spawn(move || {
            for item in 0..ITEMS {
                let mut item = Box::new(item);
                while let Err(back) = producer.put(item) {
                    item = back;
                    loom::thread::yield_now();
                }
            }
        });
        for expected in 0..ITEMS {
            let item = loop {
                match consumer.take() {
                    Some(item) => break item,
                    None => loom::thread::yield_now(),
                }
            };
            assert_eq!(*item, expected);
        }
        assert!(consumer.take().is_none());
        thread.join().unwrap();
    });
}

#[test]
fn items_that_nobody_takes_are_freed_whichever_end_goes_first() {
    check(|| {
        let (mut producer, mut consumer) = ring::<Box<usize>, Word>(2);
        let thread = loom::thread::spawn(move || {
            let _ = producer.put(Box::new(1));
            let _ = producer.put(Box::new(2));
        });
        drop(consumer.take());
        drop(consumer);
        thread.join().unwrap();
    });
}
