//! Every interleaving between two submission queue senders and the receiver, which sleeps.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p weft-fabric --release --test loom_bell`
//!
//! The ring and the bell are the production code; the event descriptor is a count under a lock. Sleeps have no
//! timeout, so that a lost wake-up is a deadlock.
#![cfg(loom)]

#[path = "common/loom_word.rs"]
mod loom_word;

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use loom_word::{Futex, Word};
use weft_fabric::testing::{Bell, Ring};

struct Model {
    ring: Ring<u32, Word>,
    bell: Bell<Futex>,
    event: Mutex<u32>,
    written: Condvar,
}

impl Model {
    fn new() -> Arc<Model> {
        Arc::new(Model {
            ring: Ring::new(2),
            bell: Bell::default(),
            event: Mutex::new(0),
            written: Condvar::new(),
        })
    }

    fn send(&self, item: u32) {
        self.ring.put(item).unwrap();
        if self.bell.ring() {
            *self.event.lock().unwrap() += 1;
            self.written.notify_all();
        }
    }

    /// One receiver turn without an item: sleeps until an event.
    fn sleep(&self) {
        self.bell.announce();
        if self.ring.is_empty() {
            let mut event = self.event.lock().unwrap();
            while *event == 0 {
                event = self.written.wait(event).unwrap();
            }
        }
        self.bell.withdraw();
        *self.event.lock().unwrap() = 0;
    }
}

fn check(senders: u32) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let model = Model::new();
        let send = |item| {
            let model = model.clone();
            thread::spawn(move || model.send(item))
        };
        let threads: Vec<_> = (0..senders).map(send).collect();
        let mut taken = 0;
        while taken < senders {
            match model.ring.take() {
                Some(_) => taken += 1,
                None => model.sleep(),
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_sender_wakes_a_receiver_that_sleeps() {
    check(1);
}

#[test]
fn of_two_senders_no_item_is_left_behind() {
    check(2);
}
