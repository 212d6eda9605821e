//! A device's primary context.

use crate::device::Device;
use crate::driver::{Driver, call, driver};
use crate::error::{Error, Result};
use cudarc::driver::sys::{
    CUcontext, CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget,
};
use std::marker::PhantomData;
use std::sync::Arc;

const ALREADY_ENABLED: u32 = 704;

/// A device's primary context, shared with PyTorch and the CUDA runtime. CUDA keeps it while it is
/// retained.
pub struct Context {
    pub(crate) driver: &'static Driver,
    device: Device,
    handle: CUcontext,
}

// SAFETY: a context may be made current on any thread, and on several at once.
unsafe impl Send for Context {}
// SAFETY: as above; the fields are immutable.
unsafe impl Sync for Context {}

/// Guard that keeps a context current on this thread; restores the earlier one on drop.
#[must_use = "the context is current only for the lifetime of this value"]
pub struct Bound<'a> {
    earlier: Option<CUcontext>,
    driver: &'static Driver,
    // The current context belongs to the thread, so this value is not `Send`.
    context: PhantomData<(&'a Context, *const ())>,
}

impl Context {
    /// Retains a device's primary context; creates it if necessary.
    ///
    /// # Errors
    ///
    /// CUDA errors: the device may be out of memory, or in exclusive use by another process.
    pub fn primary(device: Device) -> Result<Arc<Self>> {
        let driver = driver()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle; the device handle came from the driver.
        unsafe {
            call!(driver, cuDevicePrimaryCtxRetain(&raw mut handle, device.properties.handle))
        }?;
        Ok(Arc::new(Self { driver, device, handle }))
    }

    /// The context's device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Makes the context current on this thread permanently; cheap if it is already. This changes the current
    /// device on the thread: use [`Context::enter`] on the user's threads.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn bind(&self) -> Result<()> {
        if self.is_current()? {
            return Ok(());
        }
        // SAFETY: the context is retained.
        unsafe { call!(self.driver, cuCtxSetCurrent(self.handle)) }
    }

    /// Makes the context current on this thread until the guard is dropped.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn enter(&self) -> Result<Bound<'_>> {
        let current = self.current()?;
        let earlier = (current != self.handle).then_some(current);
        if earlier.is_some() {
            // SAFETY: the context is retained.
            unsafe { call!(self.driver, cuCtxSetCurrent(self.handle)) }?;
        }
        Ok(Bound { earlier, driver: self.driver, context: PhantomData })
    }

    /// True if the context is current on this thread.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn is_current(&self) -> Result<bool> {
        Ok(self.current()? == self.handle)
    }

    /// Lets this device access memory on `peer` that [`DeviceMemory`](crate::DeviceMemory) or PyTorch
    /// allocated in this process.
    ///
    /// # Errors
    ///
    /// CUDA errors, such as no peer access between the devices.
    pub fn enable_peer(&self, peer: &Self) -> Result<()> {
        if self.device == peer.device {
            return Ok(());
        }
        let _bound = self.enter()?;
        // SAFETY: this context is current, the peer's is retained, and no flags are defined.
        match unsafe { call!(self.driver, cuCtxEnablePeerAccess(peer.handle, 0)) } {
            Err(Error::Call { code: ALREADY_ENABLED, .. }) => Ok(()),
            result => result,
        }
    }

    /// Waits, without a bound, until the device has completed all work in this context. Not for kernels that may
    /// hang.
    ///
    /// # Errors
    ///
    /// CUDA errors, including from earlier asynchronous work.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.enter()?;
        // SAFETY: the context is current.
        unsafe { call!(self.driver, cuCtxSynchronize()) }
    }

    fn current(&self) -> Result<CUcontext> {
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one handle, or null.
        unsafe { call!(self.driver, cuCtxGetCurrent(&raw mut current)) }?;
        Ok(current)
    }

    /// Waits until NIC writes into device memory that completed before this call are visible to all
    /// devices. The driver's call has no deadline.
    ///
    /// # Errors
    ///
    /// CUDA errors: the device must be [`RdmaWrites::Flushed`](crate::RdmaWrites::Flushed) or
    /// [`RdmaWrites::Ordered`](crate::RdmaWrites::Ordered).
    pub fn flush_rdma_writes(&self) -> Result<()> {
        use CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES as ALL;
        use CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX as CURRENT;
        let _bound = self.enter()?;
        // SAFETY: takes two numbers, and the context is current.
        unsafe { call!(self.driver, cuFlushGPUDirectRDMAWrites(CURRENT, ALL)) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by this value. An error means that CUDA is shut down already.
        let _ = unsafe {
            call!(self.driver, cuDevicePrimaryCtxRelease_v2(self.device.properties.handle))
        };
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        let Some(earlier) = self.earlier else { return };
        // SAFETY: this context, or null, was current on this thread before.
        let _ = unsafe { call!(self.driver, cuCtxSetCurrent(earlier)) };
    }
}
