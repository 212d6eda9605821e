//! Relaxed capture mode: calls on one thread while another captures a graph.

use crate::driver::{Driver, call, driver};
use crate::error::Result;
use std::marker::PhantomData;
use std::ops::Deref;

const RELAXED: u32 = 2;

/// Guard for this thread's relaxed capture mode: it permits calls that a stream capture on another thread
/// forbids, such as allocations and event queries. For Weft's own threads, whose calls belong to no graph:
/// PyTorch captures in the mode that forbids such calls to all threads.
#[must_use = "capture is relaxed only for the lifetime of this value"]
pub struct RelaxedCapture {
    driver: &'static Driver,
    earlier: u32,
    // The mode belongs to the thread, so this value is not `Send`.
    thread: PhantomData<*const ()>,
}

impl RelaxedCapture {
    /// Relaxes this thread's mode.
    ///
    /// # Errors
    ///
    /// [`Error::Absent`](crate::Error::Absent) without CUDA, and CUDA errors.
    pub fn new() -> Result<Self> {
        let driver = driver()?;
        let earlier = exchange(driver, RELAXED)?;
        Ok(Self { driver, earlier, thread: PhantomData })
    }
}

/// CUDA object whose drop is valid while another thread captures a graph.
pub struct Relaxed<T>(Option<T>);

impl<T> Relaxed<T> {
    /// Object owner.
    pub fn new(object: T) -> Self {
        Self(Some(object))
    }
}

impl<T> Deref for Relaxed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("taken by the drop alone")
    }
}

impl<T> Drop for Relaxed<T> {
    fn drop(&mut self) {
        let _relaxed = RelaxedCapture::new();
        self.0.take();
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // An error has no remedy here.
        let _ = exchange(self.driver, self.earlier);
    }
}

/// Sets this thread's mode; returns the earlier one.
fn exchange(driver: &Driver, mut mode: u32) -> Result<u32> {
    let address = (&raw mut mode).cast();
    // SAFETY: reads and writes an enumeration, which in C is an unsigned int.
    unsafe { call!(driver, cuThreadExchangeStreamCaptureMode(address)) }?;
    Ok(mode)
}
