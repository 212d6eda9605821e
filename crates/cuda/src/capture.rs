//! Calls while a graph is captured elsewhere.

use crate::driver::{Driver, call, driver};
use crate::error::Result;
use std::marker::PhantomData;

const RELAXED: u32 = 2;

/// While it lives, this thread may make calls that a stream's capture on another thread would forbid,
/// such as allocations and queries of events. For threads of ours, whose calls no graph is to hold:
/// PyTorch captures in the mode that forbids them to all threads.
#[must_use = "capture is relaxed only while this lives"]
pub struct RelaxedCapture {
    driver: &'static Driver,
    earlier: u32,
    // The mode is the thread's: this stays on it.
    thread: PhantomData<*const ()>,
}

impl RelaxedCapture {
    /// Relaxes this thread's mode.
    ///
    /// # Errors
    ///
    /// [`Error::Absent`](crate::Error::Absent) without CUDA, and what CUDA says.
    pub fn new() -> Result<Self> {
        let driver = driver()?;
        let earlier = exchange(driver, RELAXED)?;
        Ok(Self { driver, earlier, thread: PhantomData })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // There is nothing to do about an error.
        let _ = exchange(self.driver, self.earlier);
    }
}

/// Sets this thread's mode and returns the earlier one.
fn exchange(driver: &Driver, mut mode: u32) -> Result<u32> {
    let address = (&raw mut mode).cast();
    // SAFETY: it reads and writes an enumeration, which for C is such a number.
    unsafe { call!(driver, cuThreadExchangeStreamCaptureMode(address)) }?;
    Ok(mode)
}
