//! Rail: one NIC of one group: its endpoint, its completion queue, and the writes under way on it.

use super::object::{Domain, Endpoint, Mr, Queue, Result};
use super::sys;
use super::wire::Target;
use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::RawFd;
use std::sync::Arc;
use weft_control::Rank;

/// The most ranges of one part, whatever a provider takes.
pub const MAX_RANGES: usize = 16;
/// Completions read at a time.
const BATCH: usize = 16;
/// Batches of one poll.
const BATCHES: usize = 8;

/// The provider's scratch memory of one operation (`fi_context2`).
#[repr(C, align(64))]
struct Context(UnsafeCell<[usize; 8]>);

// SAFETY: only the provider reads and writes it, under locks of its own.
unsafe impl Sync for Context {}

/// Operation that a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// A part that the engine posted.
    Part { token: u64, peer: u32, is_bulk: bool },
    /// A part whose end was reported when its peer was fenced.
    Abandoned,
    /// A message of the link's own.
    Own { peer: u32 },
    /// A posted receive, for a provider that consumes one for each immediate.
    Receive,
    /// None.
    Free,
}

/// What a rail reports of its queue.
pub enum Event {
    /// An operation of ours has ended.
    Ended(Use),
    /// An operation of ours has failed: its error number, and in words.
    Failed(Use, i32, String),
    /// A part has arrived with this immediate ([`super::wire::immediate`]), of this sender if the provider
    /// names it.
    Arrived(u64, Option<Rank>),
}

/// Slots for operations under way; their contexts stay where they are.
struct Slots {
    contexts: Box<[Context]>,
    uses: Vec<Use>,
    free: Vec<u32>,
}

impl Slots {
    fn new(count: usize) -> Slots {
        let contexts = (0..count).map(|_| Context(UnsafeCell::default())).collect();
        Slots { contexts, uses: vec![Use::Free; count], free: (0..count as u32).rev().collect() }
    }

    fn context(&self, slot: u32) -> *mut c_void {
        self.contexts[slot as usize].0.get().cast()
    }

    /// The slot that has this context.
    fn of(&self, context: *mut c_void) -> Option<usize> {
        let offset = (context.addr()).wrapping_sub(self.contexts.as_ptr().addr());
        let slot = offset / size_of::<Context>();
        (offset.is_multiple_of(size_of::<Context>()) && slot < self.uses.len()).then_some(slot)
    }

    /// Frees the slot of a context; returns its use.
    fn take(&mut self, context: *mut c_void) -> Option<Use> {
        let slot = self.of(context)?;
        let used = std::mem::replace(&mut self.uses[slot], Use::Free);
        if used == Use::Free {
            return None;
        }
        self.free.push(slot as u32);
        Some(used)
    }
}

/// A write, as the endpoint takes it.
pub struct Message<'a> {
    pub address: sys::Address,
    /// Source ranges, and their descriptors; as many destinations.
    pub sources: &'a [libc::iovec],
    pub descriptors: &'a mut [*mut c_void],
    pub destinations: &'a [sys::RmaRange],
    pub immediate: u64,
}

/// One NIC of one group.
pub struct Rail {
    /// `None` once it was closed. It goes before all that it uses.
    endpoint: Option<Endpoint>,
    /// Where peers aim signals, and the source of ours.
    page: Page,
    queue: Queue,
    slots: Slots,
    entries: Box<Entries>,
    /// Where arrivals name their senders.
    senders: Option<Box<Senders>>,
    domain: Arc<Domain>,
    /// Slots that are kept for messages of the link's own.
    reserve: usize,
    consumes_receives: bool,
    /// Receives that ended and are not posted again yet.
    lacking: usize,
    /// Receives that failed so far.
    failures: u64,
}

/// A few bytes that are granted to everybody and never written: the target of signals.
struct Page {
    remote: Mr,
    /// Where sources are registered, too.
    local: Option<Mr>,
    bytes: Box<UnsafeCell<[u64; 8]>>,
}

/// Room for completions that are read together.
struct Entries([sys::CqEntry; BATCH]);

// SAFETY: their pointers are the provider's, and are compared only.
unsafe impl Send for Entries {}

/// Senders of the completions that were read together.
struct Senders {
    addresses: [sys::Address; BATCH],
    ranks: HashMap<sys::Address, Rank>,
}

/// Sizes of a rail's queues.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Parts that may be under way.
    pub parts: usize,
    /// Messages of the link's own that may be.
    pub own: usize,
    /// Arrivals that may lie in the queue.
    pub arrivals: usize,
    pub peers: usize,
}

impl Rail {
    /// An endpoint that is enabled. `key` makes a key for memory that is registered.
    pub fn open(domain: &Arc<Domain>, sizes: Sizes, key: u64, is_efa: bool) -> Result<Rail> {
        Rail::open_as(domain, sizes, key, is_efa, domain.info().consumes_receives())
    }

    fn open_as(
        domain: &Arc<Domain>,
        sizes: Sizes,
        key: u64,
        is_efa: bool,
        consumes_receives: bool,
    ) -> Result<Rail> {
        let receives = if consumes_receives { sizes.arrivals } else { 0 };
        let under_way = sizes.parts + sizes.own;
        let queue = Queue::open(domain, under_way + sizes.arrivals)?;
        // The peers, and the endpoint itself.
        let endpoint = Endpoint::open(domain, &queue, sizes.peers + 1)?;
        if is_efa {
            prefer_bounded_queues(&endpoint, consumes_receives);
        }
        endpoint.enable()?;
        let page = Page::new(domain, key)?;
        let blank = sys::CqEntry {
            op_context: std::ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: std::ptr::null_mut(),
            data: 0,
        };
        let mut rail = Rail {
            endpoint: Some(endpoint),
            page,
            queue,
            slots: Slots::new(under_way + receives),
            entries: Box::new(Entries([blank; BATCH])),
            senders: None,
            domain: domain.clone(),
            reserve: sizes.own,
            consumes_receives,
            lacking: 0,
            failures: 0,
        };
        for _ in 0..receives {
            if !rail.post_receive()? {
                return Err(format!("fi_recv: the provider takes fewer than {receives} receives"));
            }
        }
        Ok(rail)
    }

    /// Name of its endpoint, for peers.
    pub fn name(&self) -> Result<Vec<u8>> {
        self.endpoint.as_ref().ok_or("the endpoint is closed")?.name()
    }

    /// From now on arrivals name their senders. Comes before any [`Rail::insert`]: the first address, 0, is
    /// made that of this endpoint, as ofi_rxm of libfabric 1.17 gives 0 for every sender.
    pub fn name_senders(&mut self) -> Result<()> {
        let endpoint = self.endpoint.as_ref().ok_or("the endpoint is closed")?;
        let mut name = endpoint.name()?;
        // A provider may read a whole address of its format.
        name.resize(512, 0);
        // SAFETY: it is this endpoint's own name.
        unsafe { endpoint.insert(&name)? };
        let senders = Senders { addresses: [sys::Address::MAX; BATCH], ranks: HashMap::new() };
        self.senders = Some(Box::new(senders));
        Ok(())
    }

    /// Takes in a peer's endpoint.
    ///
    /// # Safety
    /// The name is one of the same provider and address format.
    pub unsafe fn insert(&mut self, peer: Rank, name: &[u8]) -> Result<sys::Address> {
        let endpoint = self.endpoint.as_ref().ok_or("the endpoint is closed")?;
        // SAFETY: by the caller's promise.
        let address = unsafe { endpoint.insert(name) }?;
        if let Some(senders) = &mut self.senders {
            senders.ranks.insert(address, peer);
        }
        Ok(address)
    }

    /// Where peers aim signals.
    pub fn signal_target(&self) -> Target {
        let base = self.domain.info().uses_addresses();
        let base = if base { self.page.bytes.get().addr() as u64 } else { 0 };
        Target { base, key: self.page.remote.key() }
    }

    /// Whether one more part may be under way.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.slots.free.len() > self.reserve + self.lacking
    }

    /// Starts a part. False: the provider takes no more now.
    ///
    /// # Errors
    /// Its error number ([`Rail::describe`]).
    ///
    /// # Safety
    /// Sources and their registrations stay valid until the part has ended or the endpoint is closed.
    #[inline(always)]
    pub unsafe fn write(
        &mut self,
        message: &mut Message<'_>,
        flags: u64,
        used: Use,
    ) -> Result<bool, i32> {
        let Some(endpoint) = &self.endpoint else { return Err(libc::ESHUTDOWN) };
        let Some(slot) = self.slots.free.pop() else { return Ok(false) };
        let raw = sys::RmaMessage {
            msg_iov: message.sources.as_ptr(),
            desc: message.descriptors.as_mut_ptr(),
            iov_count: message.sources.len(),
            addr: message.address,
            rma_iov: message.destinations.as_ptr(),
            rma_iov_count: message.destinations.len(),
            context: self.slots.context(slot),
            data: message.immediate,
        };
        let flags = flags | sys::FI_REMOTE_CQ_DATA | sys::FI_COMPLETION;
        // SAFETY: sources by the caller's promise; the context lives as long as the endpoint.
        let result = unsafe { endpoint.write(&raw, flags) };
        if result == 0 {
            self.slots.uses[slot as usize] = used;
            return Ok(true);
        }
        self.slots.free.push(slot);
        is_taken(result)
    }

    /// Writes a part that the provider copies: it has ended when this returns. False: as for [`Rail::write`].
    ///
    /// # Errors
    /// As [`Rail::write`].
    ///
    /// # Safety
    /// The source is valid memory of the host.
    #[inline(always)]
    pub unsafe fn inject(
        &mut self,
        address: sys::Address,
        source: &libc::iovec,
        destination: &sys::RmaRange,
        immediate: u64,
    ) -> Result<bool, i32> {
        let Some(endpoint) = &self.endpoint else { return Err(libc::ESHUTDOWN) };
        // SAFETY: by the caller's promise.
        is_taken(unsafe { endpoint.inject(address, source, destination, immediate) })
    }

    /// As [`Rail::inject`], a message of no bytes.
    ///
    /// # Errors
    /// As [`Rail::write`].
    #[inline(always)]
    pub fn inject_signal(
        &mut self,
        (address, target): (sys::Address, Target),
        immediate: u64,
    ) -> Result<bool, i32> {
        let source = libc::iovec { iov_base: self.page.bytes.get().cast(), iov_len: 0 };
        let destination = sys::RmaRange { addr: target.base, len: 0, key: target.key };
        // SAFETY: the page lives as long as the endpoint.
        unsafe { self.inject(address, &source, &destination, immediate) }
    }

    /// An error of [`Rail::write`] in words.
    #[cold]
    pub fn describe(&self, error: i32) -> String {
        if self.is_closed() {
            return "the endpoint is closed".into();
        }
        super::object::check("fi_writemsg", -error).err().unwrap_or_default()
    }

    /// Starts a message of no bytes.
    ///
    /// # Errors
    /// As [`Rail::write`].
    pub fn signal(
        &mut self,
        (address, target): (sys::Address, Target),
        immediate: u64,
        flags: u64,
        used: Use,
    ) -> Result<bool, i32> {
        let source = self.page.bytes.get().cast();
        let sources = [libc::iovec { iov_base: source, iov_len: 0 }];
        let mut descriptors = [self.page.descriptor()];
        let destinations = [sys::RmaRange { addr: target.base, len: 0, key: target.key }];
        let mut message = Message {
            address,
            sources: &sources,
            descriptors: &mut descriptors,
            destinations: &destinations,
            immediate,
        };
        // SAFETY: the page lives as long as the endpoint.
        unsafe { self.write(&mut message, flags, used) }
    }

    /// Posts a receive. False: the provider takes no more now.
    fn post_receive(&mut self) -> Result<bool> {
        let Some(endpoint) = &self.endpoint else { return Ok(true) };
        let Some(slot) = self.slots.free.pop() else { return Ok(false) };
        // SAFETY: the context lives as long as the endpoint.
        let result = unsafe { endpoint.receive(self.slots.context(slot)) };
        if result != 0 {
            self.slots.free.push(slot);
            return match result {
                _ if result == -sys::FI_EAGAIN => Ok(false),
                _ => super::object::check("fi_recv", result as i32).map(|()| false),
            };
        }
        self.slots.uses[slot as usize] = Use::Receive;
        Ok(true)
    }

    /// Posts receives in place of those that ended, as far as the provider takes them: with fewer than were
    /// agreed on, an arrival would wait for ever.
    fn post_lacking(&mut self) {
        while self.lacking > 0 {
            match self.post_receive() {
                Ok(true) => {}
                Ok(false) => return,
                Err(why) => {
                    log::error!("a receive for immediates could not be posted again: {why}");
                }
            }
            self.lacking -= 1;
        }
    }

    /// Makes progress, and reports what has happened.
    pub fn poll(&mut self, mut report: impl FnMut(Event)) {
        if self.lacking > 0 {
            self.post_lacking();
        }
        let batches = if self.is_closed() { 0 } else { BATCHES };
        for _ in 0..batches {
            let count = match &mut self.senders {
                None => self.queue.read(&mut self.entries.0),
                Some(senders) => self.queue.read_from(&mut self.entries.0, &mut senders.addresses),
            };
            if count == -sys::FI_EAVAIL {
                if let Some(event) = self.read_error() {
                    report(event);
                }
                continue;
            }
            let Ok(count) = usize::try_from(count) else { return };
            for index in 0..count.min(BATCH) {
                let sender = self.senders.as_ref().and_then(|senders| senders.of(index));
                if let Some(event) = self.take_entry(index, sender) {
                    report(event);
                }
            }
            if count < BATCH {
                return;
            }
        }
    }

    /// What the completion at this place of the batch reports.
    #[inline(always)]
    fn take_entry(&mut self, index: usize, sender: Option<Rank>) -> Option<Event> {
        let sys::CqEntry { op_context, flags, data, .. } = self.entries.0[index];
        if flags & sys::FI_REMOTE_CQ_DATA == 0 {
            let used = self.slots.take(op_context);
            if used.is_none() {
                log::warn!("libfabric completed an operation that was not under way");
            }
            return used.map(Event::Ended);
        }
        if self.consumes_receives {
            self.renew_receive(op_context);
        }
        Some(Event::Arrived(data, sender))
    }

    /// Posts a receive in place of one that an arrival has consumed.
    #[inline(never)]
    fn renew_receive(&mut self, context: *mut c_void) {
        self.slots.take(context);
        self.lacking += 1;
        self.post_lacking();
    }

    /// Posts a receive again that has failed.
    fn renew_failed_receive(&mut self, why: &str) {
        self.failures += 1;
        if self.failures.is_power_of_two() {
            log::warn!("receive {} has failed: {why}; posted again", self.failures);
        }
        self.lacking += 1;
        self.post_lacking();
    }

    #[cold]
    fn read_error(&mut self) -> Option<Event> {
        let (error, why) = self.queue.read_error()?;
        let used =
            if error.op_context.is_null() { None } else { self.slots.take(error.op_context) };
        match used {
            None => log::warn!("an arrival failed: {why}"),
            Some(Use::Receive) => self.renew_failed_receive(&why),
            Some(_) => {}
        }
        used.map(|used| Event::Failed(used, error.err, why))
    }

    /// Marks the parts toward a peer as abandoned; calls `abandon` with the token of each. True if there
    /// are any.
    pub fn abandon(&mut self, peer: u32, mut abandon: impl FnMut(u64)) -> bool {
        let mut any = false;
        for used in &mut self.slots.uses {
            if let Use::Part { token, peer: toward, .. } = *used
                && toward == peer
            {
                *used = Use::Abandoned;
                abandon(token);
                any = true;
            }
        }
        any
    }

    /// Whether parts are abandoned that have not ended.
    pub fn has_abandoned(&self) -> bool {
        self.slots.uses.contains(&Use::Abandoned)
    }

    /// Closes the endpoint: no byte of this group's memory is read or written through it any more.
    pub fn close(&mut self) {
        self.endpoint = None;
    }

    pub fn is_closed(&self) -> bool {
        self.endpoint.is_none()
    }

    /// A descriptor to sleep on, where the provider has one.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.queue.descriptor()
    }

    /// Arms the descriptor; false if there is something to do.
    pub fn may_sleep(&self) -> bool {
        self.queue.may_sleep()
    }
}

impl Senders {
    /// The sender of one of these completions.
    fn of(&self, index: usize) -> Option<Rank> {
        self.ranks.get(&self.addresses[index]).copied()
    }
}

/// Whether the provider has taken a write, by what its call returned.
#[inline(always)]
fn is_taken(result: isize) -> Result<bool, i32> {
    if result == 0 {
        return Ok(true);
    }
    let is_full = result == -sys::FI_EAGAIN || result == -(sys::FI_ENOMEM as isize);
    if is_full { Ok(false) } else { Err(-result as i32) }
}

impl Page {
    fn new(domain: &Arc<Domain>, key: u64) -> Result<Page> {
        let bytes = Box::new(UnsafeCell::new([0; 8]));
        let (address, length) = (bytes.get().addr() as u64, size_of::<[u64; 8]>());
        // SAFETY: the box stays where it is, and goes after its registrations.
        let (remote, local) = unsafe {
            let remote = domain.register(address, length, None, sys::FI_REMOTE_WRITE, key)?;
            let is_local = domain.info().registers_sources();
            let local = is_local.then(|| {
                domain.register(address, length, None, sys::FI_WRITE, key.wrapping_add(1))
            });
            (remote, local.transpose()?)
        };
        Ok(Page { remote, local, bytes })
    }

    fn descriptor(&self) -> *mut c_void {
        self.local.as_ref().map_or(std::ptr::null_mut(), Mr::descriptor)
    }
}

/// Endpoints of EFA: arrivals shall consume receives, so that their number is bounded, and a receiver that
/// is not ready is waited for. Libraries that lack an option keep their own way.
fn prefer_bounded_queues(endpoint: &Endpoint, consumes_receives: bool) {
    if consumes_receives {
        let unsolicited = false;
        if let Err(why) = endpoint.set(sys::FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV, &unsolicited) {
            log::debug!("unsolicited receives of RDMA writes stay on: {why}");
        }
    }
    /// Retries for ever.
    const FOR_EVER: usize = 7;
    if let Err(why) = endpoint.set(sys::FI_OPT_EFA_RNR_RETRY, &FOR_EVER) {
        log::debug!("a receiver that is not ready is retried as the library likes: {why}");
    }
}

#[cfg(test)]
mod tests {
    use super::super::{OfiProvider, info, library};
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};
    use std::time::{Duration, Instant};

    const RECEIVES: usize = 3;
    const SIZES: Sizes = Sizes { parts: 2, own: 1, arrivals: RECEIVES, peers: 1 };

    fn posted(rail: &Rail) -> Vec<u32> {
        let slots = (0..).zip(&rail.slots.uses);
        slots.filter(|(_, used)| **used == Use::Receive).map(|(slot, _)| slot).collect()
    }

    /// Receives over a provider that needs none, and a cancelled one for one that fails.
    #[test]
    #[cfg_attr(miri, ignore = "miri loads no library")]
    fn a_receive_that_fails_is_posted_again() {
        if let Err(why) = library() {
            return println!("skipped: {why}");
        }
        let (provider, bind) = (OfiProvider::new("tcp;ofi_rxm"), IpAddr::V4(Ipv4Addr::LOCALHOST));
        let offer = info::offers(&provider, bind, 0).unwrap().remove(0);
        let domain = Arc::new(Domain::open(offer).unwrap());
        let mut rail = Rail::open_as(&domain, SIZES, 2, false, true).unwrap();
        for round in 0..3 {
            let receives = posted(&rail);
            assert_eq!(receives.len(), RECEIVES, "in round {round}");
            let endpoint = rail.endpoint.as_ref().unwrap();
            receives.iter().for_each(|slot| endpoint.cancel(rail.slots.context(*slot)).unwrap());
            let mut failed = 0;
            let deadline = Instant::now() + Duration::from_secs(20);
            while failed < RECEIVES {
                assert!(Instant::now() < deadline, "{failed} have failed in round {round}");
                rail.poll(|event| match event {
                    Event::Failed(Use::Receive, libc::ECANCELED, _) => failed += 1,
                    _ => panic!("no other operation is under way"),
                });
            }
        }
        assert!(rail.has_room(), "a receive has the place of a part");
    }
}
