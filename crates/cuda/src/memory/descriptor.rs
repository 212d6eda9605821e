//! Descriptors that the driver opened.

use crate::error::{Error, Result};
use rustix::fd::FromRawFd;
use std::ffi::c_int;
use std::os::fd::OwnedFd;

/// Takes over a descriptor that the driver opened, and sets close-on-exec.
///
/// # Safety
///
/// `number` is negative, or an open descriptor without another owner.
pub(super) unsafe fn own(number: c_int) -> Result<OwnedFd> {
    if number < 0 {
        return Err(Error::Descriptor(format!("the driver returned the number {number}")));
    }
    // SAFETY: open and without an owner, as guaranteed by the caller.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)
        .map_err(|error| Error::Descriptor(error.to_string()))?;
    Ok(descriptor)
}
