//! Rail: one NIC in one group, with endpoint, completion queue and writes in flight.

use super::super::gpu_memory::FlushedGpus;
use super::super::granted_regions::RemoteMemory;
use super::efa_options;
use super::objects::{CompletionQueue, Domain, Endpoint, Result};
use super::signal_buffer::SignalBuffer;
use super::slots::{SlotUse, Slots};
use super::sys;
use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::RawFd;
use std::sync::Arc;
use weft_control::Rank;

/// Maximum ranges in one part, for all providers.
pub const MAX_RANGES: usize = 16;
/// Completions per read.
const BATCH: usize = 16;
/// Reads per poll.
const BATCHES: usize = 8;

/// Completion queue event on a rail.
pub enum CompletionEvent {
    /// Completed local operation.
    Ended(SlotUse),
    /// Failed local operation: error number and message.
    Failed(SlotUse, i32, String),
    /// Arrival with the immediate ([`super::wire::immediate`]) and the sender, if the provider names it.
    Arrived(u64, Option<Rank>),
    /// A batch's arrivals are dropped: a GPU was not flushed, for this reason.
    Unflushed(String),
}

/// RDMA write for an endpoint.
pub struct RmaWrite<'a> {
    pub address: sys::Address,
    /// Source ranges with descriptors, and as many destinations.
    pub sources: &'a [libc::iovec],
    pub descriptors: &'a mut [*mut c_void],
    pub destinations: &'a [sys::RmaRange],
    pub immediate: u64,
}

/// One group's NIC.
pub struct Rail {
    /// `None` once closed. Dropped before the objects that it uses.
    endpoint: Option<Endpoint>,
    /// Target for the peers' signals, and source for ours.
    signal_buffer: SignalBuffer,
    queue: CompletionQueue,
    slots: Slots,
    entries: Box<CompletionBatch>,
    /// Present where arrivals name the sender.
    senders: Option<Box<Senders>>,
    domain: Arc<Domain>,
    /// Slots reserved for control messages.
    reserve: usize,
    consumes_receives: bool,
    /// False if an arrival with length 0 may have brought bytes.
    reports_lengths: bool,
    /// Completed receives to post again.
    missing_receives: usize,
    /// Failed receives.
    failures: u64,
}

/// Buffer for one completion read.
struct CompletionBatch([sys::CqEntry; BATCH]);

// SAFETY: the pointers in it are the provider's, and are only compared.
unsafe impl Send for CompletionBatch {}

/// Senders for the completions from one read.
struct Senders {
    addresses: [sys::Address; BATCH],
    ranks: HashMap<sys::Address, Rank>,
}

/// Queue sizes on a rail.
#[derive(Clone, Copy, Debug)]
pub struct QueueSizes {
    /// Parts in flight.
    pub parts: usize,
    /// Control messages in flight.
    pub control: usize,
    /// Unconsumed arrivals.
    pub arrivals: usize,
    pub peers: usize,
}

impl Rail {
    /// Opens and enables an endpoint. `key`: even key for the signal buffer.
    pub fn open(domain: &Arc<Domain>, sizes: QueueSizes, key: u64, is_efa: bool) -> Result<Rail> {
        Rail::open_as(domain, sizes, key, is_efa, domain.info().consumes_receives())
    }

    fn open_as(
        domain: &Arc<Domain>,
        sizes: QueueSizes,
        key: u64,
        is_efa: bool,
        consumes_receives: bool,
    ) -> Result<Rail> {
        let receives = if consumes_receives { sizes.arrivals } else { 0 };
        let in_flight = sizes.parts + sizes.control;
        let queue = CompletionQueue::open(domain, in_flight + sizes.arrivals)?;
        // The peers, and the endpoint itself.
        let endpoint = Endpoint::open(domain, &queue, sizes.peers + 1)?;
        if is_efa {
            efa_options::prefer_bounded_queues(&endpoint, consumes_receives);
        }
        if is_efa && domain.info().reaches_devices() {
            efa_options::leave_gpus_to_the_nic(&endpoint);
        }
        endpoint.enable()?;
        let signal_buffer = SignalBuffer::new(domain, key)?;
        let blank = sys::CqEntry {
            op_context: std::ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: std::ptr::null_mut(),
            data: 0,
        };
        let mut rail = Rail {
            endpoint: Some(endpoint),
            signal_buffer,
            queue,
            slots: Slots::new(in_flight + receives),
            entries: Box::new(CompletionBatch([blank; BATCH])),
            senders: None,
            domain: domain.clone(),
            reserve: sizes.control,
            consumes_receives,
            reports_lengths: domain.info().reports_lengths(),
            missing_receives: 0,
            failures: 0,
        };
        for _ in 0..receives {
            if !rail.post_receive()? {
                return Err(format!(
                    "fi_recv: the provider accepts fewer than {receives} receives"
                ));
            }
        }
        Ok(rail)
    }

    /// Endpoint name, for peers.
    pub fn name(&self) -> Result<Vec<u8>> {
        self.endpoint.as_ref().ok_or("the endpoint is closed")?.name()
    }

    /// Enables sender names. Call it before any [`Rail::insert`]: the first address, 0, becomes this
    /// endpoint's, because ofi_rxm in libfabric 1.17 reports 0 for every sender.
    pub fn enable_senders(&mut self) -> Result<()> {
        let endpoint = self.endpoint.as_ref().ok_or("the endpoint is closed")?;
        let mut name = endpoint.name()?;
        // A provider may read a whole address in this format.
        name.resize(512, 0);
        // SAFETY: it is this endpoint's own name.
        unsafe { endpoint.insert(&name)? };
        let senders = Senders { addresses: [sys::Address::MAX; BATCH], ranks: HashMap::new() };
        self.senders = Some(Box::new(senders));
        Ok(())
    }

    /// Inserts a peer's endpoint into the address vector.
    ///
    /// # Safety
    /// The name comes from the same provider and has the same address format.
    pub unsafe fn insert(&mut self, peer: Rank, name: &[u8]) -> Result<sys::Address> {
        let endpoint = self.endpoint.as_ref().ok_or("the endpoint is closed")?;
        // SAFETY: by the caller's contract.
        let address = unsafe { endpoint.insert(name) }?;
        if let Some(senders) = &mut self.senders {
            senders.ranks.insert(address, peer);
        }
        Ok(address)
    }

    /// Target for the peers' signals.
    pub fn signal_target(&self) -> RemoteMemory {
        self.signal_buffer.target(self.domain.info().uses_addresses())
    }

    /// True if one more part may be in flight.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.slots.free.len() > self.reserve + self.missing_receives
    }

    /// Posts a part; false if the provider accepts no more now.
    ///
    /// # Errors
    /// The provider's error number ([`Rail::describe`]).
    ///
    /// # Safety
    /// Sources and registrations stay valid until the part has ended or the endpoint is closed.
    #[inline(always)]
    pub unsafe fn write(
        &mut self,
        message: &mut RmaWrite<'_>,
        flags: u64,
        slot_use: SlotUse,
    ) -> Result<bool, i32> {
        let mut raw = sys::RmaMessage {
            msg_iov: message.sources.as_ptr(),
            desc: message.descriptors.as_mut_ptr(),
            iov_count: message.sources.len(),
            addr: message.address,
            rma_iov: message.destinations.as_ptr(),
            rma_iov_count: message.destinations.len(),
            context: std::ptr::null_mut(),
            data: message.immediate,
        };
        // SAFETY: by the caller's contract.
        unsafe { self.post_message(&mut raw, flags, slot_use) }
    }

    /// [`Rail::write`] for a prepared message, whose context it sets.
    ///
    /// # Errors
    /// Same as [`Rail::write`].
    ///
    /// # Safety
    /// Same as [`Rail::write`]; the message's pointers are valid during the call.
    #[inline(always)]
    pub unsafe fn post_message(
        &mut self,
        message: &mut sys::RmaMessage,
        flags: u64,
        slot_use: SlotUse,
    ) -> Result<bool, i32> {
        let Some(endpoint) = &self.endpoint else { return Err(libc::ESHUTDOWN) };
        let Some(slot) = self.slots.free.pop() else { return Ok(false) };
        message.context = self.slots.context(slot);
        let flags = flags | sys::FI_REMOTE_CQ_DATA | sys::FI_COMPLETION;
        // SAFETY: sources by the caller's contract; the context lives as long as the endpoint.
        let result = unsafe { endpoint.write(message, flags) };
        if result == 0 {
            self.slots.uses[slot as usize] = slot_use;
            return Ok(true);
        }
        self.slots.free.push(slot);
        is_taken(result)
    }

    /// Posts a part that the provider copies: it is complete on return. Returns as [`Rail::write`].
    ///
    /// # Errors
    /// Same as [`Rail::write`].
    ///
    /// # Safety
    /// The source is valid host memory.
    #[inline(always)]
    pub unsafe fn inject(
        &mut self,
        address: sys::Address,
        source: &libc::iovec,
        destination: &sys::RmaRange,
        immediate: u64,
    ) -> Result<bool, i32> {
        let Some(endpoint) = &self.endpoint else { return Err(libc::ESHUTDOWN) };
        // SAFETY: by the caller's contract.
        is_taken(unsafe { endpoint.inject(address, source, destination, immediate) })
    }

    /// Same as [`Rail::inject`], an empty write.
    ///
    /// # Errors
    /// Same as [`Rail::write`].
    #[inline(always)]
    pub fn inject_signal(
        &mut self,
        (address, target): (sys::Address, RemoteMemory),
        immediate: u64,
    ) -> Result<bool, i32> {
        let source = self.signal_buffer.source();
        let destination = sys::RmaRange { addr: target.base, len: 0, key: target.key };
        // SAFETY: the signal buffer lives as long as the endpoint.
        unsafe { self.inject(address, &source, &destination, immediate) }
    }

    /// Message for an error from [`Rail::write`].
    #[cold]
    pub fn describe(&self, error: i32) -> String {
        if self.is_closed() {
            return "the endpoint is closed".into();
        }
        super::library::check("fi_writemsg", -error).err().unwrap_or_default()
    }

    /// Posts an empty write.
    ///
    /// # Errors
    /// Same as [`Rail::write`].
    pub fn signal(
        &mut self,
        (address, target): (sys::Address, RemoteMemory),
        immediate: u64,
        flags: u64,
        slot_use: SlotUse,
    ) -> Result<bool, i32> {
        let sources = [self.signal_buffer.source()];
        let mut descriptors = [self.signal_buffer.descriptor()];
        let destinations = [sys::RmaRange { addr: target.base, len: 0, key: target.key }];
        let mut message = RmaWrite {
            address,
            sources: &sources,
            descriptors: &mut descriptors,
            destinations: &destinations,
            immediate,
        };
        // SAFETY: the signal buffer lives as long as the endpoint.
        unsafe { self.write(&mut message, flags, slot_use) }
    }

    /// Posts a receive; false if the provider accepts no more now.
    fn post_receive(&mut self) -> Result<bool> {
        let Some(endpoint) = &self.endpoint else { return Ok(true) };
        let Some(slot) = self.slots.free.pop() else { return Ok(false) };
        // SAFETY: the context lives as long as the endpoint.
        let result = unsafe { endpoint.receive(self.slots.context(slot)) };
        if result != 0 {
            self.slots.free.push(slot);
            return match result {
                _ if result == -sys::FI_EAGAIN => Ok(false),
                _ => super::library::check("fi_recv", result as i32).map(|()| false),
            };
        }
        self.slots.uses[slot as usize] = SlotUse::Receive;
        Ok(true)
    }

    /// Posts receives in place of completed ones, as far as the provider accepts them: with fewer than
    /// the agreed number an arrival would wait indefinitely.
    fn post_missing_receives(&mut self) {
        while self.missing_receives > 0 {
            match self.post_receive() {
                Ok(true) => {}
                Ok(false) => return,
                Err(why) => {
                    log::error!("cannot post a receive for immediates again: {why}");
                }
            }
            self.missing_receives -= 1;
        }
    }

    /// Makes progress and reports events. A batch's arrivals follow the flush that makes them visible.
    pub fn poll(&mut self, gpus: &FlushedGpus, mut report: impl FnMut(CompletionEvent)) {
        if self.missing_receives > 0 {
            self.post_missing_receives();
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
            let flushed = gpus.flush(|| self.has_payload(count.min(BATCH)));
            for index in 0..count.min(BATCH) {
                let sender = self.senders.as_ref().and_then(|senders| senders.of(index));
                match self.take_entry(index, sender) {
                    Some(CompletionEvent::Arrived(..)) if flushed.is_err() => {}
                    Some(event) => report(event),
                    None => {}
                }
            }
            if let Err(why) = flushed {
                return report(CompletionEvent::Unflushed(why));
            }
            if count < BATCH {
                return;
            }
        }
    }

    /// True if an arrival among the first `count` completions may have brought bytes.
    #[inline(never)]
    fn has_payload(&self, count: usize) -> bool {
        let has_arrived = |it: &&sys::CqEntry| it.flags & sys::FI_REMOTE_CQ_DATA != 0;
        let mut arrivals = self.entries.0[..count].iter().filter(has_arrived);
        arrivals.any(|it| it.len > 0 || !self.reports_lengths)
    }

    /// Event for one completion in the batch.
    #[inline(always)]
    fn take_entry(&mut self, index: usize, sender: Option<Rank>) -> Option<CompletionEvent> {
        let sys::CqEntry { op_context, flags, data, .. } = self.entries.0[index];
        if flags & sys::FI_REMOTE_CQ_DATA == 0 {
            let slot_use = self.slots.take(op_context);
            if slot_use.is_none() {
                log::warn!("libfabric completed an operation that was not in flight");
            }
            return slot_use.map(CompletionEvent::Ended);
        }
        if self.consumes_receives {
            self.renew_receive(op_context);
        }
        Some(CompletionEvent::Arrived(data, sender))
    }

    /// Posts a receive in place of one consumed by an arrival.
    #[inline(never)]
    fn renew_receive(&mut self, context: *mut c_void) {
        self.slots.take(context);
        self.missing_receives += 1;
        self.post_missing_receives();
    }

    /// Posts a receive in place of a failed one.
    fn renew_failed_receive(&mut self, why: &str) {
        self.failures += 1;
        if self.failures.is_power_of_two() {
            log::warn!("receive {} failed: {why}; posted again", self.failures);
        }
        self.missing_receives += 1;
        self.post_missing_receives();
    }

    #[cold]
    fn read_error(&mut self) -> Option<CompletionEvent> {
        let (error, why) = self.queue.read_error()?;
        let slot_use =
            if error.op_context.is_null() { None } else { self.slots.take(error.op_context) };
        match slot_use {
            None => log::warn!("an arrival failed: {why}"),
            Some(SlotUse::Receive) => self.renew_failed_receive(&why),
            Some(_) => {}
        }
        slot_use.map(|slot_use| CompletionEvent::Failed(slot_use, error.err, why))
    }

    /// Abandons the parts toward a peer; calls `abandon` with each token. True if there are any.
    pub fn abandon(&mut self, peer: u32, mut abandon: impl FnMut(u64)) -> bool {
        let mut any = false;
        for slot_use in &mut self.slots.uses {
            if let SlotUse::Part { token, peer: toward, .. } = *slot_use
                && toward == peer
            {
                *slot_use = SlotUse::Abandoned;
                abandon(token);
                any = true;
            }
        }
        any
    }

    /// True while abandoned parts have not ended.
    pub fn has_abandoned(&self) -> bool {
        self.slots.uses.contains(&SlotUse::Abandoned)
    }

    /// Replaces the provider's read function.
    #[cfg(test)]
    pub fn script(&mut self, read: sys::ReadFunction, reports_lengths: bool) {
        self.queue.script(read);
        self.reports_lengths = reports_lengths;
    }

    /// Replaces the provider's write function.
    #[cfg(test)]
    pub fn script_writes(&self, write: sys::WriteFunction) {
        self.endpoint.as_ref().unwrap().script(write);
    }

    /// NIC name.
    pub fn nic(&self) -> String {
        self.domain.info().domain_name()
    }

    /// Closes the endpoint, which ends all access to this group's memory through it.
    pub fn close(&mut self) {
        self.endpoint = None;
    }

    pub fn is_closed(&self) -> bool {
        self.endpoint.is_none()
    }

    /// Descriptor to sleep on, where the provider has one.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.queue.descriptor()
    }

    /// Arms the descriptor; false if a completion is ready.
    pub fn may_sleep(&self) -> bool {
        self.queue.may_sleep()
    }
}

impl Senders {
    /// Sender for one completion.
    fn of(&self, index: usize) -> Option<Rank> {
        self.ranks.get(&self.addresses[index]).copied()
    }
}

/// True if the provider accepted a write, by the call's result.
#[inline(always)]
fn is_taken(result: isize) -> Result<bool, i32> {
    if result == 0 {
        return Ok(true);
    }
    let is_full = result == -sys::FI_EAGAIN || result == -(sys::FI_ENOMEM as isize);
    if is_full { Ok(false) } else { Err(-result as i32) }
}

#[cfg(test)]
mod tests {
    use super::super::{OfiProvider, info, library};
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};
    use std::time::{Duration, Instant};

    const RECEIVES: usize = 3;
    const SIZES: QueueSizes = QueueSizes { parts: 2, control: 1, arrivals: RECEIVES, peers: 1 };

    fn posted(rail: &Rail) -> Vec<u32> {
        let slots = (0..).zip(&rail.slots.uses);
        slots.filter(|(_, slot_use)| **slot_use == SlotUse::Receive).map(|(slot, _)| slot).collect()
    }

    /// Posts receives over a provider that needs none, and cancels them in place of failures.
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
                rail.poll(&FlushedGpus::default(), |event| match event {
                    CompletionEvent::Failed(SlotUse::Receive, libc::ECANCELED, _) => failed += 1,
                    _ => panic!("no other operation is in flight"),
                });
            }
        }
        assert!(rail.has_room(), "a receive occupies the slot of a part");
    }
}
