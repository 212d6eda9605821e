//! Error numbers, and the words for statuses and events.

use super::super::sys;
use std::ffi::{c_int, c_uint};

/// Sets `errno`.
pub(super) fn set_error(error: c_int) {
    // SAFETY: the location is this thread's.
    unsafe { *libc::__errno_location() = error };
}

/// Completion status in words.
pub(super) fn status_text(status: c_uint) -> &'static std::ffi::CStr {
    match status {
        sys::IBV_WC_SUCCESS => c"success",
        sys::IBV_WC_LOC_PROT_ERR => c"local protection error",
        sys::IBV_WC_WR_FLUSH_ERR => c"flushed",
        sys::IBV_WC_REM_ACCESS_ERR => c"remote access error",
        sys::IBV_WC_RETRY_EXC_ERR => c"no acknowledgement after all retries",
        _ => c"unknown status",
    }
}

/// Asynchronous event kind in words.
pub(super) fn event_text(kind: c_uint) -> &'static std::ffi::CStr {
    match kind {
        sys::IBV_EVENT_CQ_ERR => c"completion queue failed",
        sys::IBV_EVENT_QP_FATAL => c"queue pair failed",
        sys::IBV_EVENT_QP_ACCESS_ERR => c"access violation",
        sys::IBV_EVENT_DEVICE_FATAL => c"device failed",
        sys::IBV_EVENT_PORT_ACTIVE => c"port active",
        sys::IBV_EVENT_PORT_ERR => c"port down",
        _ => c"unknown event",
    }
}
