//! Every interleaving of a producer and a consumer.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p weft-fabric --release --test loom_ring`
#![cfg(loom)]

#[path = "common/loom_word.rs"]
mod loom_word;

use loom_word::Word;
use weft_fabric::ring::ring;

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
