//! Registered memory in a process that forks.
//!
//! A NIC accesses the pages that it was given. Kernels since 5.12 copy them for a forked child, so that
//! they stay with the parent. On older kernels libibverbs keeps them out of children, if `ibv_fork_init`
//! was called: a child that touches anything else on such a page, for example heap data, is killed by a
//! signal.

use super::super::dynamic_library::function;
use rustix::mm::{Advice, madvise};
use std::ffi::{c_int, c_void};

/// `ibv_is_fork_initialized` status: the kernel copies registered pages at a fork.
const IBV_FORK_UNNEEDED: c_int = 2;

/// Prepares libibverbs for forks. Returns true if the kernel copies registered pages.
///
/// # Errors
/// A missing function.
///
/// # Safety
/// The handle belongs to libibverbs, in which no function runs.
pub unsafe fn prepare(handle: *mut c_void) -> Result<bool, String> {
    type Call = unsafe extern "C" fn() -> c_int;
    // SAFETY: the functions have this type; the former exists since rdma-core 35.
    unsafe {
        let status = function::<Call>(handle, c"ibv_is_fork_initialized", None);
        if status.is_ok_and(|status| status() == IBV_FORK_UNNEEDED) {
            return Ok(true);
        }
        let fork_init: Call = function(handle, c"ibv_fork_init", None)?;
        let result = fork_init();
        if result != 0 {
            let why = std::io::Error::from_raw_os_error(result);
            log::warn!("ibv_fork_init: {why}; forked processes must not touch registered memory");
        }
    }
    Ok(false)
}

/// Gives registered pages to children forked later, if the kernel copies them ([`prepare`]). libibverbs
/// keeps them out if `RDMAV_FORK_SAFE` is set, or if another library in the process (NCCL) has called
/// `ibv_fork_init`.
pub fn keep_in_children(copies_at_fork: bool, address: u64, length: usize) {
    if !copies_at_fork {
        return;
    }
    let page = rustix::param::page_size() as u64;
    let begin = address - address % page;
    let length = (address + length as u64).next_multiple_of(page) - begin;
    // SAFETY: the range is mapped; the advice changes neither contents nor protection.
    let advised = unsafe { madvise(begin as *mut c_void, length as usize, Advice::LinuxDoFork) };
    if let Err(error) = advised {
        log::debug!("MADV_DOFORK of {length} bytes: {error}");
    }
}
