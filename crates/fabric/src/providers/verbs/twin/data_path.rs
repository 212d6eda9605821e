//! Twin data path: the functions in the context tables.

use super::super::super::twin_gpus;
use super::super::sys;
use super::network::network;
use super::nic_info::NicInfo;
use super::null;
use super::pair::{ERROR, Request, Source};
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

/// The functions.
pub const DATA_PATH: sys::DataPath =
    sys::DataPath { poll_cq, req_notify_cq, post_srq_recv, post_send };

/// Polls after which a null device completes; `None`: a live one.
#[inline(always)]
unsafe fn null_delay(context: *mut sys::Context) -> Option<u32> {
    // SAFETY: a context from this twin, which keeps the NIC.
    let nic = unsafe { &*(*context).device.cast::<NicInfo>() };
    nic.null.load(Ordering::Relaxed).checked_sub(1)
}

unsafe extern "C" fn poll_cq(
    queue: *mut sys::Cq,
    count: c_int,
    mut entries: *mut sys::Completion,
) -> c_int {
    // SAFETY: by the call's contract: a live queue, and this many entries.
    unsafe {
        if null_delay((*queue).context).is_some() {
            return null::poll_cq(queue, count, entries);
        }
        network().poll((*queue).handle, count.max(0) as usize, |completion| {
            entries.write(completion);
            entries = entries.add(1);
        })
    }
}

unsafe extern "C" fn req_notify_cq(queue: *mut sys::Cq, _solicited: c_int) -> c_int {
    // SAFETY: a live queue.
    let queue = unsafe { (*queue).handle };
    network().queues.get_mut(&queue).into_iter().for_each(|entries| entries.armed = true);
    0
}

unsafe extern "C" fn post_srq_recv(
    queue: *mut sys::Srq,
    mut next: *mut sys::RecvRequest,
    refused: *mut *mut sys::RecvRequest,
) -> c_int {
    let mut network = network();
    let mut result = 0;
    // SAFETY: a live queue, and a request list that ends.
    let queue = unsafe { (*queue).handle };
    let Some(receives) = network.receives.get_mut(&queue) else { return libc::EINVAL };
    while !next.is_null() {
        if receives.posted.len() == receives.capacity {
            // SAFETY: as above; the caller gave a place for the refused request.
            unsafe { *refused = next };
            result = libc::ENOMEM;
            break;
        }
        // SAFETY: as above.
        unsafe {
            receives.posted.push_back((*next).wr_id);
            next = (*next).next;
        }
    }
    network.received(queue);
    result
}

unsafe extern "C" fn post_send(
    pair: *mut sys::Qp,
    first: *mut sys::SendRequest,
    refused: *mut *mut sys::SendRequest,
) -> c_int {
    // SAFETY: by the call's contract: a live pair, a request list that ends, and valid ranges.
    unsafe {
        if let Some(delay) = null_delay((*pair).context) {
            return null::post_send(pair, first, delay, refused);
        }
        post_live((*pair).qp_num, first, refused)
    }
}

/// Posts a chain. Separate from the null device, which saves none of these registers.
///
/// # Safety
/// Same as `ibv_post_send`.
#[inline(never)]
unsafe fn post_live(
    number: u32,
    mut next: *mut sys::SendRequest,
    refused: *mut *mut sys::SendRequest,
) -> c_int {
    let mut network = network();
    let Some(pair) = network.pairs.get(&number) else { return libc::EINVAL };
    let (context, max_ranges, max_inline) = (pair.context, pair.max_ranges, pair.max_inline);
    let mut result = if matches!(pair.state, sys::IBV_QPS_RTS | ERROR) { 0 } else { libc::EINVAL };
    if let Some(nic) = network.nic_of(context) {
        nic.posts += 1;
        let refusal = nic.refusals.iter().position(|(at, _)| *at == nic.posts);
        result = refusal.map_or(result, |at| nic.refusals.swap_remove(at).1);
    }
    let mut bytes = 0;
    while result == 0 && !next.is_null() {
        // SAFETY: by the caller's contract.
        let request = unsafe { copy_of(&*next, max_ranges, max_inline) };
        bytes += request.as_ref().map_or(0, |request| request.length);
        result = match request.and_then(|request| network.enqueue(number, request)) {
            Ok(()) => 0,
            Err(error) => error,
        };
        if result == 0 {
            // SAFETY: as above.
            next = unsafe { (*next).next };
        }
    }
    if result != 0 {
        // SAFETY: the caller gave a place for the refused request.
        unsafe { *refused = next };
    } else if let Some(pair) = network.pairs.get_mut(&number) {
        *if bytes > 0 { &mut pair.chains.data } else { &mut pair.chains.signals } += 1;
    }
    network.advance(number);
    result
}

/// A work request without references to the caller's.
///
/// # Safety
/// The ranges are readable if it is inline.
unsafe fn copy_of(
    request: &sys::SendRequest,
    max_ranges: c_int,
    max_inline: u64,
) -> Result<Request, c_int> {
    let immediate = match request.opcode {
        sys::IBV_WR_RDMA_WRITE => None,
        sys::IBV_WR_RDMA_WRITE_WITH_IMM => Some(request.imm_data),
        _ => return Err(libc::EINVAL),
    };
    if !(0..=max_ranges).contains(&request.num_sge) {
        return Err(libc::EINVAL);
    }
    let ranges: Vec<sys::Sge> =
        // SAFETY: a list with this length.
        (0..request.num_sge as usize).map(|index| unsafe { *request.sg_list.add(index) }).collect();
    let length = ranges.iter().map(|range| u64::from(range.length)).sum();
    let source = if request.send_flags & sys::IBV_SEND_INLINE == 0 {
        Source::Ranges(ranges)
    } else if length > max_inline {
        return Err(libc::ENOMEM);
    } else if ranges.iter().any(|range| twin_gpus::memory_at(range.addr).is_some()) {
        // The copy would end this process.
        return Err(libc::EFAULT);
    } else {
        let mut bytes = Vec::with_capacity(length as usize);
        for range in ranges {
            // SAFETY: by the caller's contract.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts(range.addr as *const u8, range.length as usize)
            });
        }
        Source::Inline(bytes)
    };
    Ok(Request {
        wr_id: request.wr_id,
        index: 0,
        is_signalled: request.send_flags & sys::IBV_SEND_SIGNALED != 0,
        immediate,
        remote_address: request.remote_addr,
        key: request.rkey,
        length,
        source,
        fault: None,
    })
}

/// Null pointer with `errno`.
pub fn refused<T>(error: c_int) -> *mut T {
    super::errors::set_error(error);
    null_mut()
}
