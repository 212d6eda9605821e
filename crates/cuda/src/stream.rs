//! Streams, and copies and writes on them.
//!
//! The functions take streams and addresses as numbers, the form in which peers and PyTorch supply them. The
//! creator of such a number is responsible for it: the stream is 0 or lives, and the addresses point to device memory,
//! or to pinned memory that outlives the work. A wrong device address is an error in a later call; a wrong host
//! address is equivalent to a wrong pointer. A context must be current on the thread: [`Context::bind`].

use crate::context::Context;
use crate::driver::{Driver, call, driver};
use crate::error::Result;
use cudarc::driver::sys::CUstream;
use std::fmt;
use std::sync::Arc;

const NON_BLOCKING: u32 = 1;
const NOT_CAPTURING: u32 = 0;

/// Borrowed stream: a raw `CUstream`, which must outlive all uses; 0 is the default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

impl Stream {
    /// Creates a stream that does not synchronise with the default stream.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn create(context: &Arc<Context>) -> Result<OwnedStream> {
        let mut handle = std::ptr::null_mut();
        let _bound = context.enter()?;
        // SAFETY: writes one handle; the context is current.
        unsafe { call!(context.driver, cuStreamCreate(&raw mut handle, NON_BLOCKING)) }?;
        Ok(OwnedStream {
            context: context.clone(),
            handle: Self(handle.expose_provenance() as u64),
        })
    }

    /// Creates a stream as [`Stream::create`] does, with the highest priority: pending blocks in its kernels are
    /// scheduled before blocks from other streams.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn create_first(context: &Arc<Context>) -> Result<OwnedStream> {
        let (mut handle, mut least, mut greatest) = (std::ptr::null_mut(), 0, 0);
        let _bound = context.enter()?;
        // SAFETY: writes two numbers; the context is current.
        unsafe {
            call!(context.driver, cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest))
        }?;
        // SAFETY: writes one handle; the context is current.
        unsafe {
            call!(
                context.driver,
                cuStreamCreateWithPriority(&raw mut handle, NON_BLOCKING, greatest)
            )
        }?;
        Ok(OwnedStream {
            context: context.clone(),
            handle: Self(handle.expose_provenance() as u64),
        })
    }

    pub(crate) fn raw(self) -> CUstream {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }
}

/// Owned stream, destroyed on drop.
pub struct OwnedStream {
    context: Arc<Context>,
    handle: Stream,
}

impl OwnedStream {
    /// Borrowed stream.
    pub fn stream(&self) -> Stream {
        self.handle
    }

    /// The stream's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits until all work on the stream is complete.
    ///
    /// # Errors
    ///
    /// CUDA errors, including from earlier asynchronous work.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.context.enter()?;
        synchronize(self.context.driver, self.handle)
    }
}

impl fmt::Debug for OwnedStream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?} of {:?}", self.handle, self.context.device())
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: this value owns it and uses it last here; the work still completes. An error means that CUDA
        // is shut down already.
        let _ = unsafe { call!(self.context.driver, cuStreamDestroy_v2(self.handle.raw())) };
    }
}

/// Copies bytes between addresses in device or pinned memory, in any context.
///
/// # Errors
///
/// CUDA errors, including from earlier asynchronous work.
pub fn copy_async(dst: u64, src: u64, bytes: usize, stream: Stream) -> Result<()> {
    if bytes == 0 {
        return driver().map(drop);
    }
    // SAFETY: the code that created the stream and the addresses is responsible for them: see the module.
    unsafe { call!(driver()?, cuMemcpyAsync(dst, src, bytes, stream.raw())) }
}

/// Sets bytes to a value.
///
/// # Errors
///
/// CUDA errors, including from earlier asynchronous work.
pub fn set_bytes_async(dst: u64, value: u8, bytes: usize, stream: Stream) -> Result<()> {
    if bytes == 0 {
        return driver().map(drop);
    }
    // SAFETY: the code that created the stream and the addresses is responsible for them: see the module.
    unsafe { call!(driver()?, cuMemsetD8Async(dst, value, bytes, stream.raw())) }
}

/// Writes a 32-bit word after all earlier work on the stream, which is visible before the word.
///
/// # Errors
///
/// CUDA errors: the address must be a multiple of 4.
pub fn stream_write_value32(stream: Stream, address: u64, value: u32) -> Result<()> {
    // SAFETY: as above. Without flags, a memory fence precedes the write.
    unsafe { call!(driver()?, cuStreamWriteValue32_v2(stream.raw(), address, value, 0)) }
}

/// Waits until all work on the stream is complete, without a bound.
///
/// # Errors
///
/// CUDA errors, including from earlier asynchronous work.
pub fn stream_synchronize(stream: Stream) -> Result<()> {
    synchronize(driver()?, stream)
}

/// True if work on the stream is being captured into a CUDA graph.
///
/// # Errors
///
/// CUDA errors, such as for the default stream while another is being captured.
pub fn is_capturing(stream: Stream) -> Result<bool> {
    let mut status = NOT_CAPTURING;
    let address = (&raw mut status).cast();
    // SAFETY: writes an enumeration, in C an unsigned int, so that values from newer drivers are valid; the code that
    // created the stream is responsible for it.
    unsafe { call!(driver()?, cuStreamIsCapturing(stream.raw(), address)) }?;
    Ok(status != NOT_CAPTURING)
}

fn synchronize(driver: &Driver, stream: Stream) -> Result<()> {
    // SAFETY: the code that created the stream is responsible for it: see the module.
    unsafe { call!(driver, cuStreamSynchronize(stream.raw())) }
}
