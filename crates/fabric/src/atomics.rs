//! Atomic words shared by processes and threads, as traits: the protocols above are generic over them, so
//! that loom models check the code that runs.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Memory orders for words, which loom models use as well: a weaker one fails a model.
pub mod orders {
    use super::Ordering;

    /// Loads.
    pub const LOAD: Ordering = Ordering::Acquire;
    /// Stores.
    pub const STORE: Ordering = Ordering::Release;
    /// Swaps, additions and bitwise operations.
    pub const UPDATE: Ordering = Ordering::AcqRel;
    /// Fences.
    pub const FENCE: Ordering = Ordering::SeqCst;
}

/// A 32-bit word with futex operations.
pub trait Word32: Send + Sync {
    /// A private word, not shared with other processes.
    fn new(value: u32) -> Self
    where
        Self: Sized;
    /// Acquire load.
    fn load(&self) -> u32;
    /// Acquire-release wrapping addition; returns the previous value.
    fn fetch_add(&self, addend: u32) -> u32;
    /// Acquire-release bitwise or; returns the previous value.
    fn fetch_or(&self, bits: u32) -> u32;
    /// Acquire-release bitwise and; returns the previous value.
    fn fetch_and(&self, bits: u32) -> u32;
    /// Sleeps while the word equals `expected`, at most `timeout`; may return early.
    fn wait(&self, expected: u32, timeout: Duration);
    /// Wakes every thread that sleeps on this word.
    fn wake(&self);
    /// Wakes one thread that sleeps on this word.
    fn wake_one(&self);
}

/// A 64-bit word.
pub trait Word64: Send + Sync {
    /// A private word, not shared with other processes.
    fn new(value: u64) -> Self
    where
        Self: Sized;
    /// Acquire load.
    fn load(&self) -> u64;
    /// Release store.
    fn store(&self, value: u64);
    /// Acquire-release swap.
    fn swap(&self, value: u64) -> u64;
    /// Acquire-release bitwise or; returns the previous value.
    fn fetch_or(&self, bits: u64) -> u64;
    /// Acquire-release compare-exchange from `expected` to `value`; true if it succeeded.
    fn replace(&self, expected: u64, value: u64) -> bool;
    /// Sequentially consistent fence: if two threads each store, fence and load, one sees the other's
    /// store.
    fn fence();
}

/// Value on a separate cache line, against false sharing.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct CacheLine<T>(pub T);

/// Cell that two threads hand to each other; loom checks that accesses never overlap.
#[cfg(loom)]
pub(crate) use loom::cell::UnsafeCell as SharedCell;

/// Cell that two threads hand to each other.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct SharedCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> SharedCell<T> {
    pub fn new(value: T) -> SharedCell<T> {
        SharedCell(std::cell::UnsafeCell::new(value))
    }

    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

impl Word32 for AtomicU32 {
    fn new(value: u32) -> AtomicU32 {
        AtomicU32::new(value)
    }

    fn load(&self) -> u32 {
        AtomicU32::load(self, orders::LOAD)
    }

    fn fetch_add(&self, addend: u32) -> u32 {
        AtomicU32::fetch_add(self, addend, orders::UPDATE)
    }

    fn fetch_or(&self, bits: u32) -> u32 {
        AtomicU32::fetch_or(self, bits, orders::UPDATE)
    }

    fn fetch_and(&self, bits: u32) -> u32 {
        AtomicU32::fetch_and(self, bits, orders::UPDATE)
    }

    fn wait(&self, expected: u32, timeout: Duration) {
        use rustix::thread::futex;
        let timeout = rustix::fs::Timespec {
            tv_sec: timeout.as_secs().min(i64::MAX as u64) as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // Not private: the word may lie in memory that several processes map. Every error (changed value,
        // signal, time) only means that the caller checks again.
        let _ = futex::wait(self, futex::Flags::empty(), expected, Some(&timeout));
    }

    fn wake(&self) {
        // Fails only for an address that is not mapped, and this one is borrowed.
        let _ = rustix::thread::futex::wake(self, rustix::thread::futex::Flags::empty(), u32::MAX);
    }

    fn wake_one(&self) {
        // As in `wake`.
        let _ = rustix::thread::futex::wake(self, rustix::thread::futex::Flags::empty(), 1);
    }
}

impl Word64 for AtomicU64 {
    fn new(value: u64) -> AtomicU64 {
        AtomicU64::new(value)
    }

    #[inline]
    fn load(&self) -> u64 {
        AtomicU64::load(self, orders::LOAD)
    }

    fn store(&self, value: u64) {
        AtomicU64::store(self, value, orders::STORE);
    }

    fn swap(&self, value: u64) -> u64 {
        AtomicU64::swap(self, value, orders::UPDATE)
    }

    fn fetch_or(&self, bits: u64) -> u64 {
        AtomicU64::fetch_or(self, bits, orders::UPDATE)
    }

    fn replace(&self, expected: u64, value: u64) -> bool {
        let (success, failure) = (orders::UPDATE, orders::LOAD);
        AtomicU64::compare_exchange(self, expected, value, success, failure).is_ok()
    }

    fn fence() {
        std::sync::atomic::fence(orders::FENCE);
    }
}
