//! Events on streams.

use crate::context::Context;
use crate::driver::{call, driver};
use crate::error::{Error, Result};
use crate::stream::Stream;
use cudarc::driver::sys::CUevent;
use std::sync::Arc;

const WITHOUT_TIME: u32 = 2;
const NOT_READY: u32 = 600;

/// Event: complete once all earlier work on its stream is complete. Timing is disabled.
pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: CUDA lets any thread use an event.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Event {}

impl Event {
    /// Event for streams in this context. An event that was never recorded is complete.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        let _bound = context.enter()?;
        // SAFETY: writes one handle; the context is current.
        unsafe { call!(context.driver, cuEventCreate(&raw mut handle, WITHOUT_TIME)) }?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Records the event on a stream; replaces the earlier record.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn record(&self, stream: Stream) -> Result<()> {
        let _bound = self.context.enter()?;
        // SAFETY: this value owns the event; the stream's creator guarantees that it lives.
        unsafe { call!(self.context.driver, cuEventRecord(self.handle, stream.raw())) }
    }

    /// True if the event is complete.
    ///
    /// # Errors
    ///
    /// CUDA errors, including from earlier asynchronous work.
    pub fn done(&self) -> Result<bool> {
        let _bound = self.context.enter()?;
        // SAFETY: this value owns the event.
        match unsafe { call!(self.context.driver, cuEventQuery(self.handle)) } {
            Ok(()) => Ok(true),
            Err(Error::Call { code: NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until the event is complete, without a bound.
    ///
    /// # Errors
    ///
    /// CUDA errors, including from earlier asynchronous work.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.context.enter()?;
        // SAFETY: this value owns the event.
        unsafe { call!(self.context.driver, cuEventSynchronize(self.handle)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: this value owns it and uses it last here. An error means that CUDA is shut down already.
        let _ = unsafe { call!(self.context.driver, cuEventDestroy_v2(self.handle)) };
    }
}

/// Makes later work on a stream wait for an event, on any device.
///
/// # Errors
///
/// CUDA errors.
pub fn stream_wait(stream: Stream, event: &Event) -> Result<()> {
    // SAFETY: the event lives; the stream's creator guarantees that it lives.
    unsafe { call!(driver()?, cuStreamWaitEvent(stream.raw(), event.handle, 0)) }
}
