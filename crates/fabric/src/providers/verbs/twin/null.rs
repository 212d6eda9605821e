//! Null device: requests complete at once or some polls later, and move no byte.
//!
//! A NIC turns into one after the queue pairs are connected ([`super::TwinNic::become_null`]). Posts and
//! polls take no lock: they are the constant cost in what a post benchmark measures.

use super::super::sys;
use std::cell::UnsafeCell;
use std::ffi::c_int;

/// Null device completions.
pub struct NullQueue(UnsafeCell<Ring>);

struct Ring {
    /// Request identity and queue pair number.
    entries: Box<[(u64, u32); LENGTH]>,
    posted: usize,
    polled: usize,
    /// Polls until the entries are visible.
    polls_left: u32,
}

/// Completions that are not yet polled; a power of two.
const LENGTH: usize = 4096;

impl NullQueue {
    pub fn new() -> NullQueue {
        let entries = Box::new([(0, 0); LENGTH]);
        NullQueue(UnsafeCell::new(Ring { entries, posted: 0, polled: 0, polls_left: 0 }))
    }
}

/// Posts a chain.
///
/// # Safety
/// Same as `ibv_post_send`; the pair's completion queue belongs to this twin, and is used by one thread
/// at a time.
#[inline]
pub unsafe fn post_send(
    pair: *mut sys::Qp,
    first: *mut sys::SendRequest,
    delay: u32,
    refused: *mut *mut sys::SendRequest,
) -> c_int {
    // SAFETY: by the caller's contract; no other NIC accesses a null device's queue.
    unsafe {
        let queue = (*(*pair).send_cq).cq_context.cast::<NullQueue>();
        let ring = &mut *(*queue).0.get();
        let mut next = first;
        while !next.is_null() {
            let request = &*next;
            if request.send_flags & sys::IBV_SEND_SIGNALED != 0 {
                if ring.posted - ring.polled == LENGTH {
                    *refused = next;
                    return libc::ENOMEM;
                }
                if ring.posted == ring.polled {
                    ring.polls_left = delay;
                }
                ring.entries[ring.posted % LENGTH] = (request.wr_id, (*pair).qp_num);
                ring.posted += 1;
            }
            next = request.next;
        }
    }
    0
}

/// Reads completions.
///
/// # Safety
/// Same as [`post_send`], and as `ibv_poll_cq`.
#[inline]
pub unsafe fn poll_cq(queue: *mut sys::Cq, count: c_int, entries: *mut sys::Completion) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe {
        let queue = (*queue).cq_context.cast::<NullQueue>();
        let ring = &mut *(*queue).0.get();
        if ring.polls_left > 0 {
            ring.polls_left -= 1;
            return 0;
        }
        let count = (ring.posted - ring.polled).min(count as usize);
        for index in 0..count {
            let (wr_id, qp_num) = ring.entries[(ring.polled + index) % LENGTH];
            let entry = &mut *entries.add(index);
            (entry.wr_id, entry.qp_num, entry.status) = (wr_id, qp_num, sys::IBV_WC_SUCCESS);
        }
        ring.polled += count;
        count as c_int
    }
}
