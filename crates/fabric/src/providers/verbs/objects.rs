//! Owned libibverbs objects: each is destroyed on drop, before the object that it was made from.

mod registration;

use super::library::{Library, text};
use super::sys;
use crate::error::Error;
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::os::fd::RawFd;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

/// Result with the failed call and the cause.
pub type Result<T, E = String> = std::result::Result<T, E>;

/// Error from the call `name` that returned null or -1 with `errno`.
fn failed(name: &str) -> String {
    format!("{name}: {}", io::Error::last_os_error())
}

/// Error from the call `name` for a result other than 0: an error number, or -1 with `errno`.
pub fn check(name: &str, result: c_int) -> Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(failed(name)),
        number => Err(format!("{name}: {}", io::Error::from_raw_os_error(number.abs()))),
    }
}

/// Objects whose destruction failed stay allocated until the process ends.
fn destroyed(name: &str, result: c_int) {
    if let Err(why) = check(name, result) {
        log::warn!("{why}");
    }
}

macro_rules! object {
    ($(#[$doc:meta])* $name:ident of $raw:ident, made from $parent:ident: $owner:ty; $destroy:ident) => {
        $(#[$doc])*
        pub struct $name {
            raw: NonNull<sys::$raw>,
            $parent: $owner,
        }

        // SAFETY: libibverbs locks objects itself; all verbs may be called on any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl $name {
            pub fn raw(&self) -> *mut sys::$raw {
                self.raw.as_ptr()
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                let library = self.library();
                // SAFETY: it is live and destroyed once; objects made from it hold it, so they are gone.
                let result = unsafe { (library.$destroy)(self.raw.as_ptr()) };
                destroyed(concat!("ibv_", stringify!($destroy)), result);
            }
        }
    };
}

object! {
    /// Open NIC.
    Context of Context, made from library: &'static Library; close_device
}
object! {
    /// Protection domain: the keys for one group on one NIC.
    ProtectionDomain of Pd, made from context: Arc<Context>; dealloc_pd
}
object! {
    /// Descriptor that becomes readable with the next completion on an armed queue.
    CompletionChannel of CompletionChannel, made from context: Arc<Context>; destroy_comp_channel
}
object! {
    /// Completion queue.
    CompletionQueue of Cq, made from channel: CompletionChannel; destroy_cq
}
object! {
    /// Receives that all queue pairs in a group on one NIC share.
    SharedReceiveQueue of Srq, made from domain: Arc<ProtectionDomain>; destroy_srq
}
object! {
    /// Registered memory; the owner keeps the memory.
    MemoryRegion of Mr, made from domain: Arc<ProtectionDomain>; dereg_mr
}
object! {
    /// Queue pair on a reliable connection.
    QueuePair of Qp, made from queues: Arc<Queues>; destroy_qp
}

/// Queues that the queue pairs in a group on one NIC share.
pub struct Queues {
    pub completions: CompletionQueue,
    pub receives: SharedReceiveQueue,
}

impl Context {
    /// Opens the NIC with this name.
    pub fn open(library: &'static Library, name: &str) -> Result<Context> {
        let devices = DeviceList::new(library)?;
        let device = devices.iter().find(|(_, known)| known == name);
        let (device, _) = device.ok_or_else(|| format!("no RDMA device {name}"))?;
        // SAFETY: the device comes from a list that has not been freed.
        let raw = NonNull::new(unsafe { (library.open_device)(device) });
        let raw = raw.ok_or_else(|| format!("{name}: {}", failed("ibv_open_device")))?;
        let context = Context { raw, library };
        // Events are read without waiting. SAFETY: the context is open, and so is the descriptor in it.
        unsafe {
            let descriptor = (*context.raw()).async_fd;
            set_nonblocking(descriptor).map_err(|e| format!("cannot set a descriptor: {e}"))?;
        }
        Ok(context)
    }

    /// NIC limits.
    pub fn attributes(&self) -> Result<sys::DeviceAttr> {
        // SAFETY: all zero is a valid value, which the call fills in.
        unsafe {
            let mut found: sys::DeviceAttr = std::mem::zeroed();
            check("ibv_query_device", (self.library.query_device)(self.raw(), &mut found))?;
            Ok(found)
        }
    }

    /// True if the device pages regions on demand for RDMA writes over reliable connections. Receives
    /// have no memory here.
    pub fn pages_on_demand(&self) -> bool {
        // SAFETY: the context is open; all zero is a valid value, which the call fills in.
        let caps = unsafe {
            let Some(query) = sys::VerbsContext::query_device_ex(self.raw()) else { return false };
            let mut found: sys::DeviceAttrEx = std::mem::zeroed();
            let size = size_of::<sys::DeviceAttrEx>();
            if query(self.raw(), null(), &mut found, size) != 0 {
                return false;
            }
            found.odp_caps
        };
        caps.general_caps & sys::IBV_ODP_SUPPORT != 0
            && caps.rc_odp_caps & sys::IBV_ODP_SUPPORT_WRITE != 0
    }

    /// State and limits for a port, numbered from 1.
    pub fn port(&self, port: u8) -> Result<sys::PortAttr> {
        let mut found = sys::PortAttr::default();
        // SAFETY: the call fills in the value.
        check("ibv_query_port", unsafe {
            (self.library.query_port)(self.raw(), port, &mut found)
        })?;
        Ok(found)
    }

    /// GID table entry for a port; `None` if it is empty.
    pub fn gid(&self, port: u8, index: u32) -> Option<sys::GidEntry> {
        let mut found = sys::GidEntry::default();
        let size = size_of::<sys::GidEntry>();
        // SAFETY: the call fills in a value with this size.
        let result = unsafe {
            (self.library.query_gid_ex)(self.raw(), port.into(), index, &mut found, 0, size)
        };
        (result == 0 && found.gid.0 != [0; 16]).then_some(found)
    }

    /// Descriptor that is readable while an asynchronous event is unread.
    pub fn event_descriptor(&self) -> RawFd {
        // SAFETY: the context is open.
        unsafe { (*self.raw()).async_fd }
    }

    /// Next asynchronous event: the kind, and the queue pair or port number where it has one. `None`
    /// without an unread event.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        let mut event = sys::AsyncEvent { element: null_mut(), event_type: 0 };
        // SAFETY: the descriptor does not block; an event that was read is acknowledged once, after the
        // last access to the element, which lives until then.
        unsafe {
            if (self.library.get_async_event)(self.raw(), &mut event) != 0 {
                return None;
            }
            let kind = event.event_type;
            let is_of_pair = (sys::IBV_EVENT_QP_FATAL..=sys::IBV_EVENT_QP_ACCESS_ERR)
                .contains(&kind)
                || kind == sys::IBV_EVENT_QP_LAST_WQE_REACHED;
            let pair = is_of_pair.then(|| (*event.element.cast::<sys::Qp>()).qp_num);
            let is_of_port = matches!(kind, sys::IBV_EVENT_PORT_ACTIVE | sys::IBV_EVENT_PORT_ERR);
            // The union's first bytes.
            let port = is_of_port.then(|| event.element.addr() as u32 as u8);
            (self.library.ack_async_event)(&mut event);
            Some(AsyncEvent { kind, pair, port })
        }
    }

    pub fn library(&self) -> &'static Library {
        self.library
    }
}

/// Asynchronous NIC event.
#[derive(Clone, Copy, Debug)]
pub struct AsyncEvent {
    pub kind: c_uint,
    /// Queue pair number.
    pub pair: Option<u32>,
    /// Port number.
    pub port: Option<u8>,
}

/// Names of this host's NICs.
pub fn device_names(library: &'static Library) -> Result<Vec<String>> {
    Ok(DeviceList::new(library)?.iter().map(|(_, name)| name).collect())
}

/// List of this host's NICs.
struct DeviceList {
    library: &'static Library,
    /// `None`: no device.
    devices: Option<NonNull<*mut c_void>>,
    count: usize,
}

impl DeviceList {
    fn new(library: &'static Library) -> Result<DeviceList> {
        let mut count = 0;
        // SAFETY: the call fills in the number.
        let devices = NonNull::new(unsafe { (library.get_device_list)(&mut count) });
        let error = io::Error::last_os_error();
        match devices {
            // A kernel without support for RDMA.
            None if error.raw_os_error() == Some(libc::ENOSYS) => {}
            None => return Err(format!("ibv_get_device_list: {error}")),
            Some(_) => {}
        }
        Ok(DeviceList { library, devices, count: count as usize })
    }

    fn iter(&self) -> impl Iterator<Item = (*mut c_void, String)> {
        let entries = self.devices.into_iter().flat_map(|first| {
            // SAFETY: the list has this many entries.
            (0..self.count).map(move |index| unsafe { *first.as_ptr().add(index) })
        });
        // SAFETY: each device has a name.
        let name = |device| unsafe { text((self.library.get_device_name)(device)) };
        entries.map(move |device| (device, name(device)))
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        if let Some(devices) = self.devices {
            // SAFETY: it is freed once.
            unsafe { (self.library.free_device_list)(devices.as_ptr()) };
        }
    }
}

impl ProtectionDomain {
    pub fn new(context: &Arc<Context>) -> Result<ProtectionDomain> {
        // SAFETY: the context is open.
        let raw = NonNull::new(unsafe { (context.library.alloc_pd)(context.raw()) });
        let raw = raw.ok_or_else(|| failed("ibv_alloc_pd"))?;
        Ok(ProtectionDomain { raw, context: context.clone() })
    }

    fn library(&self) -> &'static Library {
        self.context.library
    }
}

impl CompletionChannel {
    fn new(context: &Arc<Context>) -> Result<CompletionChannel> {
        // SAFETY: the context is open.
        let raw = NonNull::new(unsafe { (context.library.create_comp_channel)(context.raw()) });
        let raw = raw.ok_or_else(|| failed("ibv_create_comp_channel"))?;
        let channel = CompletionChannel { raw, context: context.clone() };
        let set = set_nonblocking(channel.descriptor());
        set.map_err(|e| format!("cannot set a descriptor: {e}"))?;
        Ok(channel)
    }

    fn descriptor(&self) -> RawFd {
        // SAFETY: it is open.
        unsafe { self.raw.as_ref() }.fd
    }

    fn library(&self) -> &'static Library {
        self.context.library
    }
}

impl CompletionQueue {
    /// Queue with room for at least `entries` completions.
    pub fn new(context: &Arc<Context>, entries: usize) -> Result<CompletionQueue> {
        let channel = CompletionChannel::new(context)?;
        let (raw, count) = (context.raw(), entries as c_int);
        // SAFETY: context and channel are open; the queue keeps both.
        let raw = unsafe { (context.library.create_cq)(raw, count, null_mut(), channel.raw(), 0) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("ibv_create_cq"))?;
        Ok(CompletionQueue { raw, channel })
    }

    /// Reads completions into `entries`; returns how many.
    #[inline(always)]
    pub fn poll(&self, entries: &mut [sys::Completion]) -> Result<usize> {
        let (queue, count) = (self.raw(), entries.len() as c_int);
        // SAFETY: the queue is open, and the entries have the right type.
        let count = unsafe {
            let poll = (*(*queue).context).ops.poll_cq;
            poll(queue, count, entries.as_mut_ptr())
        };
        usize::try_from(count).map_err(|_| "ibv_poll_cq failed".into())
    }

    /// Descriptor to sleep on.
    pub fn descriptor(&self) -> RawFd {
        self.channel.descriptor()
    }

    /// Arms the descriptor for the next completion.
    pub fn arm(&self) -> Result<()> {
        let queue = self.raw();
        // SAFETY: the queue is open.
        let result = unsafe { ((*(*queue).context).ops.req_notify_cq)(queue, 0) };
        check("ibv_req_notify_cq", result)
    }

    /// Takes the descriptor's events, so that it is readable only after the next.
    pub fn take_events(&self) {
        let (mut queue, mut context) = (null_mut(), null_mut());
        let library = self.library();
        let mut count = 0;
        // SAFETY: the channel is open and does not block; it has only this queue.
        unsafe {
            while (library.get_cq_event)(self.channel.raw(), &mut queue, &mut context) == 0 {
                count += 1;
            }
            if count > 0 {
                (library.ack_cq_events)(self.raw(), count);
            }
        }
    }

    fn library(&self) -> &'static Library {
        self.channel.library()
    }
}

impl SharedReceiveQueue {
    /// Queue for up to `entries` receives without buffers.
    pub fn new(domain: &Arc<ProtectionDomain>, entries: u32) -> Result<SharedReceiveQueue> {
        let (srq_context, max_wr) = (null_mut(), entries);
        let mut wanted = sys::SrqInitAttr { srq_context, max_wr, max_sge: 1, srq_limit: 0 };
        // SAFETY: the domain is open; the queue keeps it.
        let raw = unsafe { (domain.library().create_srq)(domain.raw(), &mut wanted) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("ibv_create_srq"))?;
        Ok(SharedReceiveQueue { raw, domain: domain.clone() })
    }

    /// Posts `count` receives with this id, for arrivals with an immediate and without bytes. Returns the
    /// number that the queue accepted.
    pub fn post(&self, wr_id: u64, count: usize) -> (usize, Result<()>) {
        /// Receives posted in one call.
        const BATCH: usize = 32;
        let mut posted = 0;
        while posted < count {
            let batch = BATCH.min(count - posted);
            let blank =
                sys::RecvRequest { wr_id, next: null_mut(), sg_list: null_mut(), num_sge: 0 };
            let mut requests = [blank; BATCH];
            for index in (1..batch).rev() {
                requests[index - 1].next = &mut requests[index];
            }
            let (queue, mut refused) = (self.raw(), null_mut());
            // SAFETY: the queue is open; it copies the requests.
            let result = unsafe {
                let post = (*(*queue).context).ops.post_srq_recv;
                post(queue, requests.as_mut_ptr(), &mut refused)
            };
            if result != 0 {
                let accepted = if refused.is_null() {
                    0
                } else {
                    (refused.addr() - requests.as_ptr().addr()) / size_of::<sys::RecvRequest>()
                };
                return (posted + accepted, check("ibv_post_srq_recv", result));
            }
            posted += batch;
        }
        (posted, Ok(()))
    }

    fn library(&self) -> &'static Library {
        self.domain.library()
    }
}

impl QueuePair {
    /// Queue pair in the state RESET.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        queues: &Arc<Queues>,
        requests: u32,
        ranges: u32,
        inline_bytes: u32,
    ) -> Result<(QueuePair, u32)> {
        let mut wanted = sys::QpInitAttr {
            qp_context: null_mut(),
            send_cq: queues.completions.raw(),
            recv_cq: queues.completions.raw(),
            srq: queues.receives.raw(),
            cap: sys::QpCapacity {
                max_send_wr: requests,
                max_recv_wr: 0,
                max_send_sge: ranges,
                max_recv_sge: 0,
                max_inline_data: inline_bytes,
            },
            qp_type: sys::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: all members are open; the pair keeps them.
        let raw = unsafe { (domain.library().create_qp)(domain.raw(), &mut wanted) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("ibv_create_qp"))?;
        Ok((QueuePair { raw, queues: queues.clone() }, wanted.cap.max_inline_data))
    }

    /// Queue pair number, by which peers address it.
    pub fn number(&self) -> u32 {
        // SAFETY: it is open.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// Changes the attributes in `mask`.
    pub fn modify(&self, attributes: &mut sys::QpAttr, mask: c_uint) -> Result<()> {
        // SAFETY: it is open.
        let result = unsafe { (self.library().modify_qp)(self.raw(), attributes, mask as c_int) };
        check("ibv_modify_qp", result)
    }

    /// Posts a work request chain; an error number if it is refused.
    ///
    /// # Safety
    /// The chain ends, and the ranges are registered and valid until it has completed or this pair is
    /// destroyed.
    #[inline(always)]
    pub unsafe fn post(&self, first: *mut sys::SendRequest) -> Result<(), c_int> {
        let (pair, mut refused) = (self.raw(), null_mut());
        // SAFETY: by the caller's contract.
        let result = unsafe { ((*(*pair).context).ops.post_send)(pair, first, &mut refused) };
        if result == 0 { Ok(()) } else { Err(result.abs()) }
    }

    fn library(&self) -> &'static Library {
        self.queues.completions.library()
    }
}

fn set_nonblocking(descriptor: RawFd) -> io::Result<()> {
    // SAFETY: the descriptor is open.
    let result = unsafe {
        let flags = libc::fcntl(descriptor, libc::F_GETFL);
        libc::fcntl(descriptor, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Provider error with a detail.
pub fn provider_error(detail: impl Into<String>) -> Error {
    Error::Provider { provider: crate::types::ProviderKind::Verbs, detail: detail.into() }
}
