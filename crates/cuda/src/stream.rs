//! Streams, and the copies and writes that are put on them.
//!
//! The functions take streams and addresses as numbers, as peers and PyTorch give them. Who makes such a
//! number answers for it: the stream is 0 or lives, and the addresses are a device's, or pinned memory
//! that outlives the work. A wrong address of a device is an error of a later call; a wrong one of the
//! host's is as bad as a wrong pointer. A context must be current on the thread: [`Context::bind`].

use crate::context::Context;
use crate::driver::{Driver, call, driver};
use crate::error::Result;
use cudarc::driver::sys::CUstream;
use std::fmt;
use std::sync::Arc;

const NON_BLOCKING: u32 = 1;
const NOT_CAPTURING: u32 = 0;

/// A stream of the caller's, as its raw `CUstream`, which must live while this is used; 0 is the
/// default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

impl Stream {
    /// A stream of our own, which does not wait for the default stream.
    ///
    /// # Errors
    ///
    /// What CUDA says.
    pub fn create(context: &Arc<Context>) -> Result<OwnedStream> {
        let mut handle = std::ptr::null_mut();
        let _bound = context.enter()?;
        // SAFETY: it writes one handle; the context is current.
        unsafe { call!(context.driver, cuStreamCreate(&raw mut handle, NON_BLOCKING)) }?;
        Ok(OwnedStream {
            context: context.clone(),
            handle: Self(handle.expose_provenance() as u64),
        })
    }

    /// As [`Stream::create`], of the highest priority that the device has: blocks of its kernels begin before those
    /// of other streams that wait for a place.
    ///
    /// # Errors
    ///
    /// What CUDA says.
    pub fn create_first(context: &Arc<Context>) -> Result<OwnedStream> {
        let (mut handle, mut least, mut greatest) = (std::ptr::null_mut(), 0, 0);
        let _bound = context.enter()?;
        // SAFETY: it writes two numbers; the context is current.
        unsafe {
            call!(context.driver, cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest))
        }?;
        // SAFETY: it writes one handle; the context is current.
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

/// A stream that ends with this.
pub struct OwnedStream {
    context: Arc<Context>,
    handle: Stream,
}

impl OwnedStream {
    /// The stream.
    pub fn stream(&self) -> Stream {
        self.handle
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits until all that is on it has been done.
    ///
    /// # Errors
    ///
    /// What CUDA says, also of work that failed earlier.
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
        // SAFETY: it is ours, and this is its end; work on it goes on to its own. An error means that
        // CUDA is gone already.
        let _ = unsafe { call!(self.context.driver, cuStreamDestroy_v2(self.handle.raw())) };
    }
}

/// Copies bytes from one address to another, both of devices or of pinned memory, in any context.
///
/// # Errors
///
/// What CUDA says, also of work that failed earlier.
pub fn copy_async(dst: u64, src: u64, bytes: usize, stream: Stream) -> Result<()> {
    if bytes == 0 {
        return driver().map(drop);
    }
    // SAFETY: who made the stream and the addresses answers for them: see above.
    unsafe { call!(driver()?, cuMemcpyAsync(dst, src, bytes, stream.raw())) }
}

/// Sets bytes to a value.
///
/// # Errors
///
/// What CUDA says, also of work that failed earlier.
pub fn set_bytes_async(dst: u64, value: u8, bytes: usize, stream: Stream) -> Result<()> {
    if bytes == 0 {
        return driver().map(drop);
    }
    // SAFETY: who made the stream and the addresses answers for them: see above.
    unsafe { call!(driver()?, cuMemsetD8Async(dst, value, bytes, stream.raw())) }
}

/// Writes a word when what came before on the stream is done, and visible before the word is.
///
/// # Errors
///
/// What CUDA says: the address must be a multiple of 4.
pub fn stream_write_value32(stream: Stream, address: u64, value: u32) -> Result<()> {
    // SAFETY: as above. With no flags, a fence stands before the write.
    unsafe { call!(driver()?, cuStreamWriteValue32_v2(stream.raw(), address, value, 0)) }
}

/// Waits until all that is on the stream has been done, without a bound.
///
/// # Errors
///
/// What CUDA says, also of work that failed earlier.
pub fn stream_synchronize(stream: Stream) -> Result<()> {
    synchronize(driver()?, stream)
}

/// Whether what is put on the stream goes into a CUDA graph.
///
/// # Errors
///
/// What CUDA says, as of the default stream while another is being captured.
pub fn is_capturing(stream: Stream) -> Result<bool> {
    let mut status = NOT_CAPTURING;
    let address = (&raw mut status).cast();
    // SAFETY: it writes an enumeration, which for C is such a number: a newer driver may have more;
    // who made the stream answers for it.
    unsafe { call!(driver()?, cuStreamIsCapturing(stream.raw(), address)) }?;
    Ok(status != NOT_CAPTURING)
}

fn synchronize(driver: &Driver, stream: Stream) -> Result<()> {
    // SAFETY: who made the stream answers for it: see above.
    unsafe { call!(driver, cuStreamSynchronize(stream.raw())) }
}
