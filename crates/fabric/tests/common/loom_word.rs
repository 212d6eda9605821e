//! Loom atomics as words in the lock-free structures, with the orders of the words that run.
#![allow(dead_code)] // Each test uses only some items.

use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::sync::{Condvar, Mutex};
use std::time::Duration;
use weft_fabric::testing::{Word32, Word64, orders};

pub struct Word(AtomicU64);

impl Word64 for Word {
    fn new(value: u64) -> Word {
        Word(AtomicU64::new(value))
    }
    fn load(&self) -> u64 {
        self.0.load(orders::LOAD)
    }
    fn store(&self, value: u64) {
        self.0.store(value, orders::STORE);
    }
    fn swap(&self, value: u64) -> u64 {
        self.0.swap(value, orders::UPDATE)
    }
    fn fetch_or(&self, bits: u64) -> u64 {
        self.0.fetch_or(bits, orders::UPDATE)
    }
    fn replace(&self, expected: u64, value: u64) -> bool {
        let (success, failure) = (orders::UPDATE, orders::LOAD);
        self.0.compare_exchange(expected, value, success, failure).is_ok()
    }
    fn fence() {
        loom::sync::atomic::fence(orders::FENCE);
    }
}

/// Word with a futex: the kernel compares and queues under one lock, and wakes under it. Sleeps have no
/// timeout, so that a lost wake-up is a deadlock.
pub struct Futex {
    word: AtomicU32,
    queue: Mutex<()>,
    woken: Condvar,
}

impl Word32 for Futex {
    fn new(value: u32) -> Futex {
        Futex { word: AtomicU32::new(value), queue: Mutex::new(()), woken: Condvar::new() }
    }
    fn load(&self) -> u32 {
        self.word.load(orders::LOAD)
    }
    fn fetch_add(&self, addend: u32) -> u32 {
        self.word.fetch_add(addend, orders::UPDATE)
    }
    fn fetch_or(&self, bits: u32) -> u32 {
        self.word.fetch_or(bits, orders::UPDATE)
    }
    fn fetch_and(&self, bits: u32) -> u32 {
        self.word.fetch_and(bits, orders::UPDATE)
    }
    fn wait(&self, expected: u32, _: Duration) {
        let queue = self.queue.lock().unwrap();
        if self.word.load(Ordering::Relaxed) == expected {
            drop(self.woken.wait(queue).unwrap());
        }
    }
    fn wake(&self) {
        let _queue = self.queue.lock().unwrap();
        self.woken.notify_all();
    }
    fn wake_one(&self) {
        let _queue = self.queue.lock().unwrap();
        self.woken.notify_one();
    }
}
