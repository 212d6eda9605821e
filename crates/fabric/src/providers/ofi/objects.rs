//! libfabric's objects with owners: each is closed on drop, before the object that it was made from.

use super::info::Info;
use super::library::{Library, check};
use super::sys;
use std::ffi::{c_int, c_void};
use std::os::fd::RawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// Result with the failed call and the cause.
pub type Result<T, E = String> = std::result::Result<T, E>;

/// Libfabric object, which begins with a [`sys::Fid`].
struct Object<T>(NonNull<T>);

// SAFETY: libfabric locks objects itself (`FI_THREAD_SAFE` is required from every provider).
unsafe impl<T> Send for Object<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Object<T> {}

impl<T> Object<T> {
    /// Owns the object that `make` returns. An error names the call.
    fn made(name: &str, make: impl FnOnce(*mut *mut T) -> c_int) -> Result<Object<T>> {
        let mut object = null_mut();
        check(name, make(&mut object))?;
        NonNull::new(object).map(Object).ok_or_else(|| format!("{name} returned no object"))
    }

    fn get(&self) -> *mut T {
        self.0.as_ptr()
    }

    fn fid(&self) -> *mut sys::Fid {
        self.0.as_ptr().cast()
    }

    fn bind(&self, other: *mut sys::Fid, flags: u64) -> Result<()> {
        // SAFETY: both objects are open; every object has operations.
        let result = unsafe { ((*(*self.fid()).ops).bind)(self.fid(), other, flags) };
        check("fi_ep_bind", result)
    }

    fn control(&self, name: &str, command: c_int, argument: *mut c_void) -> Result<()> {
        // SAFETY: the object is open; callers pass the argument that the command takes.
        let result = unsafe { ((*(*self.fid()).ops).control)(self.fid(), command, argument) };
        check(name, result)
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: it is open and closed once; objects made from it have been closed before.
        let result = unsafe { ((*(*self.fid()).ops).close)(self.fid()) };
        if let Err(why) = check("fi_close", result) {
            log::warn!("{why}");
        }
    }
}

/// Domain (one NIC's protection domain), and the fabric.
pub struct Domain {
    domain: Object<sys::Domain>,
    fabric: Object<sys::Fabric>,
    info: Info,
}

impl Domain {
    pub fn open(info: Info) -> Result<Domain> {
        let library = Library::get()?;
        let raw = info.raw();
        let fabric = Object::made("fi_fabric", |made| {
            // SAFETY: the information is valid and describes a fabric.
            unsafe { (library.fabric)((*raw).fabric_attr, made, null_mut()) }
        })?;
        let domain = Object::made("fi_domain", |made| {
            let fabric: *mut sys::Fabric = fabric.get();
            // SAFETY: the fabric is open and was made from this information.
            unsafe { ((*(*fabric).ops).domain)(fabric, raw, made, null_mut()) }
        })?;
        Ok(Domain { domain, fabric, info })
    }

    /// Offer that it was made from.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Registers host or CUDA device memory.
    ///
    /// # Safety
    /// The memory stays valid until the registration is dropped.
    pub unsafe fn register(
        self: &Arc<Self>,
        address: u64,
        length: usize,
        cuda: Option<u32>,
        access: u64,
        key: u64,
    ) -> Result<MemoryRegistration> {
        let range = libc::iovec { iov_base: address as *mut c_void, iov_len: length };
        let attributes = sys::MrAttr {
            mr_iov: &range,
            iov_count: 1,
            access,
            offset: 0,
            requested_key: key,
            context: null_mut(),
            auth_key_size: 0,
            auth_key: null_mut(),
            iface: if cuda.is_some() { sys::FI_HMEM_CUDA } else { 0 },
            device: cuda.unwrap_or(0).into(),
            later: [0; 4],
        };
        let mr = Object::made("fi_mr_regattr", |made| {
            let domain = self.domain.get();
            // SAFETY: the domain is open; the memory is valid by the caller's contract.
            unsafe { ((*(*domain).mr).regattr)(self.domain.fid(), &attributes, 0, made) }
        })?;
        Ok(MemoryRegistration { mr, _domain: self.clone() })
    }
}

/// Memory registration.
pub struct MemoryRegistration {
    mr: Object<sys::Mr>,
    _domain: Arc<Domain>,
}

impl MemoryRegistration {
    /// Remote key.
    pub fn key(&self) -> u64 {
        // SAFETY: the object is open.
        unsafe { (*self.mr.get()).key }
    }

    /// Local descriptor.
    pub fn descriptor(&self) -> *mut c_void {
        // SAFETY: the object is open.
        unsafe { (*self.mr.get()).mem_desc }
    }
}

/// Completion queue.
pub struct CompletionQueue {
    queue: Object<sys::Cq>,
    descriptor: Option<RawFd>,
    domain: Arc<Domain>,
}

impl CompletionQueue {
    /// Opens a queue with `size` entries. It has a descriptor to sleep on if the provider offers one and
    /// progresses by itself; for other providers the peers would write to the descriptor, a system call,
    /// at each completion.
    pub fn open(domain: &Arc<Domain>, size: usize) -> Result<CompletionQueue> {
        let with = |wait_obj| {
            let mut attributes = sys::CqAttr {
                size,
                flags: 0,
                format: sys::FI_CQ_FORMAT_DATA,
                wait_obj,
                signaling_vector: 0,
                wait_cond: 0,
                wait_set: null_mut(),
            };
            let it = domain.domain.get();
            Object::made("fi_cq_open", |made| {
                // SAFETY: the domain is open, and the attributes are complete.
                unsafe { ((*(*it).ops).cq_open)(it, &mut attributes, made, null_mut()) }
            })
        };
        let mut descriptor = -1;
        let mut queue = None;
        if domain.info.progresses_by_itself()
            && let Ok(made) = with(sys::FI_WAIT_FD)
        {
            let argument: *mut c_int = &mut descriptor;
            match made.control("fi_control", sys::FI_GETWAIT, argument.cast()) {
                Ok(()) => queue = Some(made),
                Err(_) => descriptor = -1,
            }
        }
        let queue = queue.map_or_else(|| with(sys::FI_WAIT_NONE), Ok)?;
        let descriptor = (descriptor >= 0).then_some(descriptor);
        Ok(CompletionQueue { queue, descriptor, domain: domain.clone() })
    }

    /// Descriptor that becomes readable with the next completion, after [`CompletionQueue::may_sleep`].
    pub fn descriptor(&self) -> Option<RawFd> {
        self.descriptor
    }

    /// Arms the descriptor; false if a completion is ready.
    pub fn may_sleep(&self) -> bool {
        let fabric = self.domain.fabric.get();
        let mut queue = self.queue.fid();
        // SAFETY: both objects are open.
        unsafe { ((*(*fabric).ops).trywait)(fabric, &mut queue, 1) == 0 }
    }

    /// Reads completions: how many, -FI_EAGAIN if there are none, or -FI_EAVAIL if an error is first.
    #[inline]
    pub fn read(&self, entries: &mut [sys::CqEntry]) -> isize {
        let queue = self.queue.get();
        // SAFETY: the queue is open and has the same format as these entries.
        unsafe { ((*(*queue).ops).read)(queue, entries.as_mut_ptr(), entries.len()) }
    }

    /// Replaces the provider's read function.
    #[cfg(test)]
    pub fn script(&self, read: sys::ReadFunction) {
        let queue = self.queue.get();
        // SAFETY: the queue is open, and no other thread has it; the table is never freed.
        unsafe {
            let ops = sys::CqOps { read, ..std::ptr::read((*queue).ops) };
            (*queue).ops = Box::leak(Box::new(ops));
        }
    }

    /// Same as [`CompletionQueue::read`], with the address that each arrival came from, where the
    /// provider names it.
    pub fn read_from(&self, entries: &mut [sys::CqEntry], senders: &mut [sys::Address]) -> isize {
        let (queue, count) = (self.queue.get(), entries.len().min(senders.len()));
        // SAFETY: as in `read`; both arrays have room for `count` entries.
        unsafe {
            let readfrom = (*(*queue).ops).readfrom;
            readfrom(queue, entries.as_mut_ptr(), count, senders.as_mut_ptr())
        }
    }

    /// Reads the error at the head of the queue, if any.
    pub fn read_error(&self) -> Option<(sys::CqError, String)> {
        let queue = self.queue.get();
        // SAFETY: all zero is a valid entry, with no buffer for the provider's data.
        let mut error: sys::CqError = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open; the entry has room for what later versions write.
        let count = unsafe { ((*(*queue).ops).readerr)(queue, &mut error, 0) };
        if count != 1 {
            return None;
        }
        let general =
            Library::get().map_or_else(|_| error.err.to_string(), |it| it.describe(error.err));
        // SAFETY: as above; the data belongs to the error.
        let particular = unsafe {
            let text =
                ((*(*queue).ops).strerror)(queue, error.prov_errno, error.err_data, null_mut(), 0);
            if text.is_null() {
                String::new()
            } else {
                std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        };
        let is_new = !particular.is_empty() && particular != general;
        let why = if is_new { format!("{general} ({particular})") } else { general };
        Some((error, why))
    }
}

/// Reliable datagram endpoint with an address vector, bound to a queue.
pub struct Endpoint {
    // Drop order: the endpoint before the objects that it is bound to.
    endpoint: Object<sys::Ep>,
    addresses: Object<sys::Av>,
    _domain: Arc<Domain>,
}

impl Endpoint {
    /// Opens an endpoint, not yet enabled.
    pub fn open(domain: &Arc<Domain>, queue: &CompletionQueue, peers: usize) -> Result<Endpoint> {
        let it = domain.domain.get();
        let mut attributes = sys::AvAttr {
            kind: sys::FI_AV_TABLE,
            rx_ctx_bits: 0,
            count: peers,
            ep_per_node: 0,
            name: std::ptr::null(),
            map_addr: null_mut(),
            flags: 0,
        };
        let addresses = Object::made("fi_av_open", |made| {
            // SAFETY: the domain is open, and the attributes are complete.
            unsafe { ((*(*it).ops).av_open)(it, &mut attributes, made, null_mut()) }
        })?;
        let endpoint = Object::made("fi_endpoint", |made| {
            // SAFETY: the domain is open and was made from this information.
            unsafe { ((*(*it).ops).endpoint)(it, domain.info.raw(), made, null_mut()) }
        })?;
        endpoint.bind(addresses.fid(), 0)?;
        endpoint.bind(queue.queue.fid(), sys::FI_TRANSMIT | sys::FI_RECV)?;
        Ok(Endpoint { endpoint, addresses, _domain: domain.clone() })
    }

    /// Sets an endpoint option.
    pub fn set<T>(&self, option: c_int, value: &T) -> Result<()> {
        let endpoint = self.endpoint.get();
        let value: *const T = value;
        // SAFETY: the endpoint is open; the length is the value's.
        let result = unsafe {
            ((*(*endpoint).ops).setopt)(
                self.endpoint.fid(),
                sys::FI_OPT_ENDPOINT,
                option,
                value.cast(),
                size_of::<T>(),
            )
        };
        check("fi_setopt", result)
    }

    pub fn enable(&self) -> Result<()> {
        self.endpoint.control("fi_enable", sys::FI_ENABLE, null_mut())
    }

    /// Endpoint address.
    pub fn name(&self) -> Result<Vec<u8>> {
        let endpoint = self.endpoint.get();
        let mut name = vec![0; 512];
        let mut length = name.len();
        // SAFETY: the endpoint is open; the length is the buffer's.
        let result = unsafe {
            ((*(*endpoint).cm).getname)(self.endpoint.fid(), name.as_mut_ptr().cast(), &mut length)
        };
        check("fi_getname", result)?;
        name.truncate(length);
        Ok(name)
    }

    /// Inserts a peer's [`Endpoint::name`] into the address vector.
    ///
    /// # Safety
    /// The name comes from the same provider and has the same address format.
    pub unsafe fn insert(&self, name: &[u8]) -> Result<sys::Address> {
        let addresses = self.addresses.get();
        let mut address = sys::Address::MAX;
        // SAFETY: the address vector is open; the name is valid by the caller's contract.
        let count = unsafe {
            ((*(*addresses).ops).insert)(
                addresses,
                name.as_ptr().cast(),
                1,
                &mut address,
                0,
                null_mut(),
            )
        };
        check("fi_av_insert", count)?;
        (count == 1).then_some(address).ok_or_else(|| "fi_av_insert: address rejected".into())
    }

    /// Replaces the provider's write function.
    #[cfg(test)]
    pub fn script(&self, writemsg: sys::WriteFunction) {
        let endpoint = self.endpoint.get();
        // SAFETY: the endpoint is open, and no other thread has it; the table is never freed.
        unsafe {
            let ops = sys::RmaOps { writemsg, ..std::ptr::read((*endpoint).rma) };
            (*endpoint).rma = Box::leak(Box::new(ops));
        }
    }

    /// Posts a write. Returns 0, or a negative error.
    ///
    /// # Safety
    /// The message's ranges, descriptors and context stay valid until the completion is read or the
    /// endpoint is closed.
    #[inline]
    pub unsafe fn write(&self, message: &sys::RmaMessage, flags: u64) -> isize {
        let endpoint = self.endpoint.get();
        // SAFETY: the endpoint is open; the message is valid by the caller's contract.
        unsafe { ((*(*endpoint).rma).writemsg)(endpoint, message, flags) }
    }

    /// Posts a write that the provider copies inside the call, without a completion. Returns the same as
    /// [`Endpoint::write`].
    ///
    /// # Safety
    /// The source is valid host memory.
    #[inline]
    pub unsafe fn inject(
        &self,
        address: sys::Address,
        source: &libc::iovec,
        destination: &sys::RmaRange,
        immediate: u64,
    ) -> isize {
        let endpoint = self.endpoint.get();
        let (bytes, length) = (source.iov_base, source.iov_len);
        let sys::RmaRange { addr, key, .. } = *destination;
        // SAFETY: the endpoint is open; the source is valid by the caller's contract.
        unsafe {
            ((*(*endpoint).rma).injectdata)(endpoint, bytes, length, immediate, address, addr, key)
        }
    }

    /// Cancels the receive with this context, which ends with an error.
    #[cfg(test)]
    pub fn cancel(&self, context: *mut c_void) -> Result<()> {
        let endpoint = self.endpoint.get();
        // SAFETY: the endpoint is open; it compares the context only.
        let result = unsafe { ((*(*endpoint).ops).cancel)(self.endpoint.fid(), context) };
        check("fi_cancel", result as c_int)
    }

    /// Posts an empty receive, for a provider that consumes one for each immediate.
    ///
    /// # Safety
    /// The context stays valid until the completion is read or the endpoint is closed.
    pub unsafe fn receive(&self, context: *mut c_void) -> isize {
        let endpoint = self.endpoint.get();
        // SAFETY: the endpoint is open; an empty receive has no buffer.
        unsafe {
            ((*(*endpoint).msg).recv)(
                endpoint,
                null_mut(),
                0,
                null_mut(),
                sys::Address::MAX,
                context,
            )
        }
    }
}
