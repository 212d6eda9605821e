//! Every interleaving between two producers and a ring's consumer.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p weft-fabric --release --test loom_inbox`
//!
//! The items are boxes, so that a lost, duplicated or doubly dropped item is a leak or a double free,
//! besides the assertions.
#![cfg(loom)]

#[path = "common/loom_word.rs"]
mod loom_word;

use loom::sync::Arc;
use loom::thread;
use loom_word::Word;
use weft_fabric::testing::Ring;

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Item that is counted while it exists.
struct Item {
    number: usize,
    _alive: Arc<()>,
}

impl Item {
    fn new(number: usize, alive: &Arc<()>) -> Box<Item> {
        Box::new(Item { number, _alive: alive.clone() })
    }
}

fn put(ring: &Ring<Box<Item>, Word>, mut item: Box<Item>) {
    while let Err(back) = ring.put(item) {
        item = back;
        thread::yield_now();
    }
}

/// The ring has been used before, so that the slots are in the second lap.
#[test]
fn what_two_producers_put_is_taken_once() {
    check(|| {
        let alive = Arc::new(());
        let ring = Arc::new(Ring::<Box<Item>, Word>::new(2));
        put(&ring, Item::new(0, &alive));
        assert_eq!(ring.take().unwrap().number, 0);
        let produce = |number| {
            let (ring, item) = (ring.clone(), Item::new(number, &alive));
            thread::spawn(move || assert!(ring.put(item).is_ok(), "there was room"))
        };
        let threads = [produce(1), produce(2)];
        let mut taken = Vec::new();
        while taken.len() < 2 {
            match ring.take() {
                Some(item) => taken.push(item.number),
                None => thread::yield_now(),
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(ring.take().is_none() && ring.is_empty());
        taken.sort_unstable();
        assert_eq!(taken, [1, 2]);
        assert_eq!(Arc::strong_count(&alive), 1);
    });
}

#[test]
fn items_cross_in_order_through_full_and_empty() {
    check(|| {
        let alive = Arc::new(());
        let ring = Arc::new(Ring::<Box<Item>, Word>::new(2));
        let (producer, items) = (ring.clone(), alive.clone());
        let thread = thread::spawn(move || {
            (0..4).for_each(|number| put(&producer, Item::new(number, &items)));
        });
        for expected in 0..4 {
            let item = loop {
                match ring.take() {
                    Some(item) => break item,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(item.number, expected);
        }
        thread.join().unwrap();
        assert!(ring.take().is_none());
        assert_eq!(Arc::strong_count(&alive), 1);
    });
}

/// Two producers for the last free slot: one gets it, the other gets the item back.
#[test]
fn a_full_ring_gives_the_item_back() {
    check(|| {
        let alive = Arc::new(());
        let ring = Arc::new(Ring::<Box<Item>, Word>::new(2));
        put(&ring, Item::new(0, &alive));
        let produce = |number| {
            let (ring, item) = (ring.clone(), Item::new(number, &alive));
            thread::spawn(move || ring.put(item).is_ok())
        };
        let threads = [produce(1), produce(2)];
        let [one, two] = threads.map(|thread| thread.join().unwrap());
        assert!(one != two, "one place was given to both, or to neither");
        assert_eq!(ring.take().unwrap().number, 0);
        assert_eq!(ring.take().unwrap().number, if one { 1 } else { 2 });
        assert!(ring.take().is_none());
        assert_eq!(Arc::strong_count(&alive), 1);
    });
}

#[test]
fn items_that_are_left_are_dropped_with_the_ring() {
    check(|| {
        let alive = Arc::new(());
        let ring = Arc::new(Ring::<Box<Item>, Word>::new(2));
        let produce = |number| {
            let (ring, item) = (ring.clone(), Item::new(number, &alive));
            thread::spawn(move || drop(ring.put(item)))
        };
        let threads = [produce(1), produce(2)];
        drop(ring.take());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        drop(ring);
        assert_eq!(Arc::strong_count(&alive), 1);
    });
}

/// A producer and the close at the same time: an accepted item is taken before the ring is drained, another one is
/// given back.
#[test]
fn a_close_loses_no_accepted_item() {
    check(|| {
        let alive = Arc::new(());
        let ring = Arc::new(Ring::<Box<Item>, Word>::new(2));
        let (producer, item) = (ring.clone(), Item::new(7, &alive));
        let thread = thread::spawn(move || producer.put(item).is_ok());
        ring.close();
        let mut taken = 0;
        while !ring.is_drained() {
            match ring.take() {
                Some(item) => taken += item.number,
                None => thread::yield_now(),
            }
        }
        assert_eq!(taken == 7, thread.join().unwrap());
        assert_eq!(Arc::strong_count(&alive), 1);
    });
}
