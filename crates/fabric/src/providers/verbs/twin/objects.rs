//! Twin calls on objects made from an open device, as `calls.rs`.

use super::super::super::twin_gpus::{self, exported_pages};
use super::super::sys;
use super::data_path::refused;
use super::errors::set_error;
use super::network::{RegisteredRange, network};
use super::nic_info::opened;
use super::null::NullQueue;
use super::pair::TwinPair;
use super::queues::{CompletionEntries, Receives, clear, close, new_descriptor};
use rustix::fd::BorrowedFd;
use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

pub unsafe extern "C" fn alloc_pd(context: *mut sys::Context) -> *mut sys::Pd {
    // SAFETY: a live context.
    let (_, number) = unsafe { opened(context) };
    let mut network = network();
    let handle = network.issue();
    network.domains.insert(handle, number);
    Box::into_raw(Box::new(sys::Pd { context, handle }))
}

pub unsafe extern "C" fn dealloc_pd(domain: *mut sys::Pd) -> c_int {
    let mut network = network();
    // SAFETY: a live domain.
    let number = unsafe { (*domain).handle };
    let is_used = network.regions.values().any(|it| it.domain == number)
        || network.receives.values().any(|it| it.domain == number)
        || network.pairs.values().any(|it| it.domain == number);
    if is_used {
        return libc::EBUSY;
    }
    network.domains.remove(&number);
    // SAFETY: it is freed once.
    drop(unsafe { Box::from_raw(domain) });
    0
}

pub unsafe extern "C" fn reg_mr_iova2(
    domain: *mut sys::Pd,
    addr: *mut c_void,
    length: usize,
    begin: u64,
    access: c_uint,
) -> *mut sys::Mr {
    let address = addr.expose_provenance() as u64;
    let is_out_of_reach =
        twin_gpus::memory_at(address).is_some_and(|memory| !memory.has_peer_memory());
    if is_out_of_reach {
        return refused(libc::EFAULT);
    }
    // SAFETY: a live domain.
    unsafe { register(domain, (begin, address), length, access) }
}

/// Address and dma-buf must have equal offsets in a page, as the kernel demands.
pub unsafe extern "C" fn reg_dmabuf_mr(
    domain: *mut sys::Pd,
    offset: u64,
    length: usize,
    begin: u64,
    descriptor: c_int,
    access: c_int,
) -> *mut sys::Mr {
    const PAGE: u64 = 4096;
    // SAFETY: the caller lends an open descriptor.
    let pages = exported_pages(unsafe { BorrowedFd::borrow_raw(descriptor) });
    let Some((first, exported)) = pages else { return refused(libc::EINVAL) };
    let is_inside = offset.checked_add(length as u64).is_some_and(|end| end <= exported);
    if !is_inside || offset % PAGE != begin % PAGE {
        return refused(libc::EINVAL);
    }
    // SAFETY: a live domain.
    unsafe { register(domain, (begin, first + offset), length, access as c_uint) }
}

/// Registers memory by its first address in work requests, and in this process.
///
/// # Safety
/// The domain is live.
unsafe fn register(
    domain: *mut sys::Pd,
    (begin, address): (u64, u64),
    length: usize,
    access: c_uint,
) -> *mut sys::Mr {
    // SAFETY: by the caller's contract.
    let (context, number) = unsafe { ((*domain).context, (*domain).handle) };
    let may_not =
        access & sys::IBV_ACCESS_REMOTE_WRITE != 0 && access & sys::IBV_ACCESS_LOCAL_WRITE == 0;
    if may_not || length == 0 {
        return refused(libc::EINVAL);
    }
    // SAFETY: the domain's context lives.
    let (nic, opened) = unsafe { opened(context) };
    let is_paged = access & sys::IBV_ACCESS_ON_DEMAND != 0;
    if is_paged && !nic.config.on_demand_paging {
        return refused(libc::EOPNOTSUPP);
    }
    let limit = if is_paged { nic.config.max_paged } else { nic.config.max_locked };
    if length as u64 > limit {
        return refused(libc::ENOMEM);
    }
    let mut network = network();
    let key = network.issue();
    let flushed_gpu = twin_gpus::memory_at(address).and_then(|memory| memory.flushed_gpu());
    let range = RegisteredRange {
        context: opened,
        domain: number,
        begin,
        address,
        length: length as u64,
        access,
        prefetched: 0,
        flushed_gpu,
    };
    network.regions.insert(key, range);
    let (addr, handle, lkey, rkey) = (begin as *mut c_void, key, key, key);
    Box::into_raw(Box::new(sys::Mr { context, pd: domain, addr, length, handle, lkey, rkey }))
}

/// Counts the bytes in ranges that lie in regions paged on demand, in one domain and with the access that
/// the advice names.
pub unsafe extern "C" fn advise_mr(
    domain: *mut sys::Pd,
    advice: c_uint,
    flags: u32,
    ranges: *mut sys::Sge,
    count: u32,
) -> c_int {
    // SAFETY: a live domain.
    let domain = unsafe { (*domain).handle };
    let needed = match advice {
        sys::IBV_ADVISE_MR_ADVICE_PREFETCH => sys::IBV_ACCESS_ON_DEMAND,
        sys::IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE => {
            sys::IBV_ACCESS_ON_DEMAND | sys::IBV_ACCESS_LOCAL_WRITE
        }
        _ => return libc::EOPNOTSUPP,
    };
    if count == 0 || flags & !sys::IBV_ADVISE_MR_FLAG_FLUSH != 0 {
        return libc::EINVAL;
    }
    let mut network = network();
    for index in 0..count as usize {
        // SAFETY: the caller lends this many ranges.
        let range = unsafe { *ranges.add(index) };
        let region = network.regions.get_mut(&range.lkey).filter(|it| it.domain == domain);
        let Some(region) = region else { return libc::ENOENT };
        let end = range.addr.checked_add(range.length.into());
        let is_inside = range.addr >= region.begin
            && end.is_some_and(|end| end <= region.begin + region.length);
        if !is_inside {
            return libc::ENOENT;
        }
        if region.access & needed != needed {
            return libc::EPERM;
        }
        region.prefetched += u64::from(range.length);
    }
    0
}

/// The region's withheld writes are lost.
pub unsafe extern "C" fn dereg_mr(region: *mut sys::Mr) -> c_int {
    // SAFETY: a live region, which is freed once.
    let region = unsafe { Box::from_raw(region) };
    let mut network = network();
    network.regions.remove(&region.lkey);
    twin_gpus::forget(region.lkey);
    0
}

pub unsafe extern "C" fn create_comp_channel(
    context: *mut sys::Context,
) -> *mut sys::CompletionChannel {
    let fd = new_descriptor();
    network().channels.insert(fd, VecDeque::new());
    Box::into_raw(Box::new(sys::CompletionChannel { context, fd, refcnt: 0 }))
}

pub unsafe extern "C" fn destroy_comp_channel(channel: *mut sys::CompletionChannel) -> c_int {
    let mut network = network();
    // SAFETY: a live channel.
    let fd = unsafe { (*channel).fd };
    if network.queues.values().any(|queue| queue.channel == Some(fd)) {
        return libc::EBUSY;
    }
    network.channels.remove(&fd);
    close(fd);
    // SAFETY: it is freed once.
    drop(unsafe { Box::from_raw(channel) });
    0
}

pub unsafe extern "C" fn create_cq(
    context: *mut sys::Context,
    entries: c_int,
    _tag: *mut c_void,
    channel: *mut sys::CompletionChannel,
    _vector: c_int,
) -> *mut sys::Cq {
    // SAFETY: a live context.
    let (nic, number) = unsafe { opened(context) };
    if !(1..=nic.config.max_cqe).contains(&entries) {
        return refused(libc::EINVAL);
    }
    let mut network = network();
    let handle = network.issue();
    let cq_context = Box::into_raw(Box::new(NullQueue::new())).cast();
    let queue = Box::new(sys::Cq { context, channel, cq_context, handle, cqe: entries });
    let queue = Box::into_raw(queue);
    let entries = CompletionEntries {
        context: number,
        handle: queue.expose_provenance(),
        // SAFETY: null, or a live channel.
        channel: unsafe { channel.as_ref() }.map(|channel| channel.fd),
        entries: VecDeque::new(),
        capacity: entries as usize,
        peak: 0,
        armed: false,
        has_overflowed: false,
    };
    network.queues.insert(handle, entries);
    queue
}

pub unsafe extern "C" fn destroy_cq(queue: *mut sys::Cq) -> c_int {
    let mut network = network();
    // SAFETY: a live queue.
    let number = unsafe { (*queue).handle };
    if network.pairs.values().any(|it| [it.send_queue, it.receive_queue].contains(&number)) {
        return libc::EBUSY;
    }
    network.queues.remove(&number);
    // SAFETY: it is freed once, with all entries as a null device.
    unsafe {
        let queue = Box::from_raw(queue);
        drop(Box::from_raw(queue.cq_context.cast::<NullQueue>()));
    }
    0
}

pub unsafe extern "C" fn get_cq_event(
    channel: *mut sys::CompletionChannel,
    queue: *mut *mut sys::Cq,
    context: *mut *mut c_void,
) -> c_int {
    // SAFETY: a live channel.
    let fd = unsafe { (*channel).fd };
    let mut network = network();
    let Some(unread) = network.channels.get_mut(&fd) else { return -1 };
    let Some(handle) = unread.pop_front() else {
        set_error(libc::EAGAIN);
        return -1;
    };
    if unread.is_empty() {
        clear(fd);
    }
    // SAFETY: places for both.
    unsafe {
        queue.write(std::ptr::with_exposed_provenance_mut(handle));
        context.write(null_mut());
    }
    0
}

pub unsafe extern "C" fn ack_cq_events(_queue: *mut sys::Cq, _count: c_uint) {}

pub unsafe extern "C" fn create_srq(
    domain: *mut sys::Pd,
    attributes: *mut sys::SrqInitAttr,
) -> *mut sys::Srq {
    // SAFETY: a live domain and context, and attributes.
    let (context, number, capacity) =
        unsafe { ((*domain).context, (*domain).handle, (*attributes).max_wr) };
    // SAFETY: as above.
    let (nic, opened) = unsafe { opened(context) };
    if !(1..=nic.config.max_srq_wr).contains(&(capacity as i32)) {
        return refused(libc::EINVAL);
    }
    let mut network = network();
    let handle = network.issue();
    let receives = Receives {
        context: opened,
        domain: number,
        posted: VecDeque::new(),
        capacity: capacity as usize,
        waiting: Vec::new(),
    };
    network.receives.insert(handle, receives);
    Box::into_raw(Box::new(sys::Srq { context, srq_context: null_mut(), pd: domain, handle }))
}

pub unsafe extern "C" fn destroy_srq(queue: *mut sys::Srq) -> c_int {
    let mut network = network();
    // SAFETY: a live queue.
    let number = unsafe { (*queue).handle };
    if network.pairs.values().any(|it| it.receives == number) {
        return libc::EBUSY;
    }
    network.receives.remove(&number);
    // SAFETY: it is freed once.
    drop(unsafe { Box::from_raw(queue) });
    0
}

pub unsafe extern "C" fn create_qp(
    domain: *mut sys::Pd,
    attributes: *mut sys::QpInitAttr,
) -> *mut sys::Qp {
    // SAFETY: a live domain and context, and attributes with live queues.
    unsafe {
        let (context, wanted) = ((*domain).context, &*attributes);
        let (nic, opened) = opened(context);
        let cap = &wanted.cap;
        if cap.max_send_wr > nic.config.max_qp_wr as u32
            || cap.max_inline_data > nic.config.max_inline
            || wanted.qp_type != sys::IBV_QPT_RC
        {
            return refused(libc::EINVAL);
        }
        let queues = [(*wanted.send_cq).handle, (*wanted.recv_cq).handle, (*wanted.srq).handle];
        let mut network = network();
        let number = network.issue();
        let mut pair = TwinPair::new(opened, (*domain).handle, queues, cap);
        let raw = Box::into_raw(Box::new(sys::Qp {
            context,
            qp_context: null_mut(),
            pd: domain,
            send_cq: wanted.send_cq,
            recv_cq: wanted.recv_cq,
            srq: wanted.srq,
            handle: number,
            qp_num: number,
            state: sys::IBV_QPS_RESET,
            qp_type: wanted.qp_type,
        }));
        pair.handle = raw.expose_provenance();
        network.pairs.insert(number, pair);
        raw
    }
}

pub unsafe extern "C" fn modify_qp(
    pair: *mut sys::Qp,
    attributes: *mut sys::QpAttr,
    mask: c_int,
) -> c_int {
    // SAFETY: a live pair, and attributes.
    let (number, attributes) = unsafe { ((*pair).qp_num, &*attributes) };
    let mut network = network();
    let changed = network.pairs.get_mut(&number).map(|it| it.modify(attributes, mask as c_uint));
    changed.unwrap_or(libc::EINVAL)
}

pub unsafe extern "C" fn destroy_qp(pair: *mut sys::Qp) -> c_int {
    let mut network = network();
    // SAFETY: a live pair, which is freed once.
    let raw = unsafe { Box::from_raw(pair) };
    if let Some(pair) = network.pairs.remove(&raw.qp_num)
        && let Some(context) = network.contexts.get_mut(&pair.context)
    {
        context.events.retain(|(_, element)| *element != pair.handle);
    }
    0
}
