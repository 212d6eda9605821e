//! loom's atomic as the 64-bit word of the lock-free parts.

use loom::sync::atomic::{AtomicU64, Ordering};
use weft_fabric::atomics::Word64;

pub struct Word(AtomicU64);

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
    fn replace(&self, expected: u64, value: u64) -> bool {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        self.0.compare_exchange(expected, value, success, failure).is_ok()
    }
}
