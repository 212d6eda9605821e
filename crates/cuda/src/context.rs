//! A device's primary context.

use crate::device::Device;
use crate::driver::{Driver, call, driver};
use crate::error::{Error, Result};
use cudarc::driver::sys::CUcontext;
use std::marker::PhantomData;
use std::sync::Arc;

const ALREADY_ENABLED: u32 = 704;

/// The primary context of a device, which PyTorch and the CUDA runtime use too. It lives as long as
/// anyone retains it.
pub struct Context {
    pub(crate) driver: &'static Driver,
    device: Device,
    handle: CUcontext,
}

// SAFETY: a context may be made current on any thread, and on several at once.
unsafe impl Send for Context {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Context {}

/// While it lives, a context is current on this thread; then the earlier one is again.
#[must_use = "the context is current only while this lives"]
pub struct Bound<'a> {
    earlier: Option<CUcontext>,
    driver: &'static Driver,
    // What is current is the thread's: this stays on it.
    context: PhantomData<(&'a Context, *const ())>,
}

impl Context {
    /// Retains the primary context of a device, and makes it if it is not there yet.
    ///
    /// # Errors
    ///
    /// What CUDA says: the device may be out of memory, or another process's alone.
    pub fn primary(device: Device) -> Result<Arc<Self>> {
        let driver = driver()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: it writes one handle, of a device of the driver's.
        unsafe {
            call!(driver, cuDevicePrimaryCtxRetain(&raw mut handle, device.properties.handle))
        }?;
        Ok(Arc::new(Self { driver, device, handle }))
    }

    /// Its device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Makes it current on this thread, for good; cheap when it is already. A thread of the user's
    /// has its current device changed by this: use [`Context::enter`] there.
    ///
    /// # Errors
    ///
    /// What CUDA says.
    pub fn bind(&self) -> Result<()> {
        if self.is_current()? {
            return Ok(());
        }
        // SAFETY: the context is retained.
        unsafe { call!(self.driver, cuCtxSetCurrent(self.handle)) }
    }

    /// Makes it current on this thread until what is returned is dropped.
    ///
    /// # Errors
    ///
    /// What CUDA says.
    pub fn enter(&self) -> Result<Bound<'_>> {
        let current = self.current()?;
        let earlier = (current != self.handle).then_some(current);
        if earlier.is_some() {
            // SAFETY: the context is retained.
            unsafe { call!(self.driver, cuCtxSetCurrent(self.handle)) }?;
        }
        Ok(Bound { earlier, driver: self.driver, context: PhantomData })
    }

    /// Whether it is current on this thread.
    ///
    /// # Errors
    ///
    /// What CUDA says.
    pub fn is_current(&self) -> Result<bool> {
        Ok(self.current()? == self.handle)
    }

    /// Lets this context's device use memory that was allocated in `peer`'s by
    /// [`DeviceMemory`](crate::DeviceMemory) or by PyTorch, in this process.
    ///
    /// # Errors
    ///
    /// What CUDA says, such as that the devices do not reach each other.
    pub fn enable_peer(&self, peer: &Self) -> Result<()> {
        if self.device == peer.device {
            return Ok(());
        }
        let _bound = self.enter()?;
        // SAFETY: this context is current, the peer's is retained, and no flags are defined.
        match unsafe { call!(self.driver, cuCtxEnablePeerAccess(peer.handle, 0)) } {
            Err(Error::Call { code: ALREADY_ENABLED, .. }) => Ok(()),
            answer => answer,
        }
    }

    /// Waits until the device has done all that was asked of it in this context. This waits without
    /// a bound: not for kernels that may hang.
    ///
    /// # Errors
    ///
    /// What CUDA says, also of work that failed earlier.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.enter()?;
        // SAFETY: the context is current.
        unsafe { call!(self.driver, cuCtxSynchronize()) }
    }

    fn current(&self) -> Result<CUcontext> {
        let mut current = std::ptr::null_mut();
        // SAFETY: it writes one handle, or null.
        unsafe { call!(self.driver, cuCtxGetCurrent(&raw mut current)) }?;
        Ok(current)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once by this. An error means that CUDA is gone already.
        let _ = unsafe {
            call!(self.driver, cuDevicePrimaryCtxRelease_v2(self.device.properties.handle))
        };
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        let Some(earlier) = self.earlier else { return };
        // SAFETY: it was current on this thread when this began, or none was (null).
        let _ = unsafe { call!(self.driver, cuCtxSetCurrent(earlier)) };
    }
}
