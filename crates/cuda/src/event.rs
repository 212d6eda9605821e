//! Events: marks on streams.

use crate::context::Context;
use crate::driver::{call, driver};
use crate::error::{Error, Result};
use crate::stream::Stream;
use cudarc::driver::sys::CUevent;
use std::sync::Arc;

const WITHOUT_TIME: u32 = 2;
const NOT_READY: u32 = 600;

/// A mark on a stream: done once all that stood before it on the stream is. It takes no time.
pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: CUDA lets any thread use an event.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Event {}

impl Event {
    /// An event, of the streams of this context. One that was never recorded is done.
    ///
    /// # Errors
    ///
    /// What CUDA says.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        let _bound = context.enter()?;
        // SAFETY: it writes one handle; the context is current.
        unsafe { call!(context.driver, cuEventCreate(&raw mut handle, WITHOUT_TIME)) }?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Puts the mark on a stream; an earlier one is forgotten.
    ///
    /// # Errors
    ///
    /// What CUDA says.
    pub fn record(&self, stream: Stream) -> Result<()> {
        let _bound = self.context.enter()?;
        // SAFETY: the event is ours, and the stream lives, for which who made it answers.
        unsafe { call!(self.context.driver, cuEventRecord(self.handle, stream.raw())) }
    }

    /// Whether all that stood before the mark is done.
    ///
    /// # Errors
    ///
    /// What CUDA says, also of work that failed earlier.
    pub fn done(&self) -> Result<bool> {
        let _bound = self.context.enter()?;
        // SAFETY: the event is ours.
        match unsafe { call!(self.context.driver, cuEventQuery(self.handle)) } {
            Ok(()) => Ok(true),
            Err(Error::Call { code: NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until it is done, without a bound.
    ///
    /// # Errors
    ///
    /// What CUDA says, also of work that failed earlier.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.context.enter()?;
        // SAFETY: the event is ours.
        unsafe { call!(self.context.driver, cuEventSynchronize(self.handle)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: it is ours, and this is its end. An error means that CUDA is gone already.
        let _ = unsafe { call!(self.context.driver, cuEventDestroy_v2(self.handle)) };
    }
}

/// Lets what follows on a stream wait for an event, of any device.
///
/// # Errors
///
/// What CUDA says.
pub fn stream_wait(stream: Stream, event: &Event) -> Result<()> {
    // SAFETY: the event lives, and so does the stream, for which who made it answers.
    unsafe { call!(driver()?, cuStreamWaitEvent(stream.raw(), event.handle, 0)) }
}
