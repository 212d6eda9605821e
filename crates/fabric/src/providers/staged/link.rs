//! The link: host memory passes through to the inner link, GPU memory takes slots.

use super::super::copy::CopyEngine;
use super::super::copy::ticker::Ticker;
use super::config::{OpenEngine, StagedConfig, StagedCounters};
use super::mode::StagedMode;
use super::peer::{POLL_INTERVAL, Stage, StagedPeer};
use super::route::StagedRoute;
use super::wire::{
    PairShape, SlotLanes, StagedAddress, StagedGrant, put_introduction, take_introduction,
};
use crate::clock;
use crate::error::{Error, Result};
use crate::id_map::{PeerMap, RegionMap};
use crate::link::{Introduction, Link, Membership, PostStatus, RouteRule, Sink, WorkRequest};
use crate::local::WaitLimit;
use crate::memory::{Memory, MemoryKind};
use crate::types::{Lane, LaneId, Page, ProviderKind, RegionKey, Time, TrafficClass};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;
use weft_control::Rank;

/// Time for which a dropped link waits until slots are at the peers.
const LINGER: Duration = Duration::from_secs(1);

/// Slot number in a control signal's token.
pub(super) const CONTROL_SLOT: u64 = 0xffff;

/// Token for the inner link: no engine request has this slot. The peer is in the low bits, as in an engine
/// token.
pub(super) fn own_token(slot: u64, peer: Rank) -> u64 {
    0xff_ffff << 40 | slot << 24 | u64::from(peer.0 & 0xff_ffff)
}

/// A raise of a lane that the wrapper holds or that this rank raises for a part.
pub(super) fn signal(peer: Rank, lane: Lane) -> WorkRequest<'static> {
    WorkRequest {
        token: own_token(CONTROL_SLOT, peer),
        peer,
        lane,
        credits: None,
        piggyback: None,
        class: TrafficClass::Latency,
        pages: &[],
    }
}

/// One group's inner link and slots.
pub(super) struct StagedLink {
    /// The inner link's address.
    pub address: Vec<u8>,
    /// The inner link's [`Link::peers_raise`].
    pub peers_raise: bool,
    /// Present until the link is dropped.
    pub inner: Option<Box<dyn Link>>,
    pub config: StagedConfig,
    pub open: Arc<OpenEngine>,
    /// Present from the first GPU region on.
    pub engine: Option<Box<dyn CopyEngine>>,
    /// No kernels move pages.
    pub engines_only: bool,
    pub counters: Arc<StagedCounters>,
    /// Regions have the engine's keys at the inner link, too, and slots have high ones (tcp). Elsewhere keys must
    /// be dense: the first ones, one for each rank, name the slots.
    pub passes_keys: bool,
    /// GPU memory is registered here or at a peer, or a slot was filled. Until then all calls pass through.
    pub is_active: bool,
    /// Peers are connected, with slots or without.
    pub has_routes: bool,
    /// Lane for each peer's first slot, which the first part from that peer takes.
    pub watched: Vec<(Rank, LaneId)>,
    pub group: Membership,
    /// Agreed shapes and issued lanes for routed peers, until they are connected.
    pub introduced: PeerMap<(PairShape, SlotLanes)>,
    pub peers: PeerMap<StagedPeer>,
    pub regions: RegionMap<Arc<Memory>>,
    pub ticker: Ticker,
    /// Events from the inner link.
    pub events: Sink,
    /// Pages in the part being posted.
    pub pages: Vec<Page>,
    /// Header for the part being posted.
    pub header: Vec<u8>,
}

impl StagedLink {
    fn own_address(&self) -> StagedAddress<'_> {
        let StagedConfig { mode, slots, slot_bytes, .. } = self.config;
        StagedAddress { mode, slots, slot_bytes, inner: &self.address }
    }

    /// The route to the link at this address.
    fn pair<'a>(&self, theirs: &'a [u8]) -> Option<StagedRoute<'a>> {
        let theirs = StagedAddress::decode(theirs)?;
        let rule = self.inner.as_ref()?.route(theirs.inner)?;
        let ours = self.own_address();
        let shape = ours.pair(&theirs, rule.parts)?;
        Some(StagedRoute { shape, rule, inner: theirs.inner, has_slots: ours.is_staged(&theirs) })
    }

    fn inner(&mut self) -> Result<&mut Box<dyn Link>> {
        // It is present until the link is dropped.
        self.inner.as_mut().ok_or(Error::Interrupted)
    }

    /// A region's key at the inner link.
    fn inner_key(&self, key: RegionKey) -> RegionKey {
        let before = if self.passes_keys { 0 } else { self.group.size };
        RegionKey(key.0.saturating_add(before))
    }

    /// Key at the inner link for the slots that are shared with `rank`, which does not own them.
    pub(super) fn slots_key(passes_keys: bool, rank: Rank) -> RegionKey {
        RegionKey(if passes_keys { RegionKey::HIGH | rank.0 } else { rank.0 })
    }

    /// Allocates and registers the slots for a peer, if there are none. Untouched pages take no memory.
    fn make_slots(&mut self, rank: Rank) -> Result<()> {
        let key = StagedLink::slots_key(self.passes_keys, rank);
        let peers_raise = self.peers_raise;
        let peer = self.peer(rank)?;
        if peer.memory.is_none() {
            let length = 2 * peer.shape.bytes() as usize;
            // A descriptor for each peer only where peers map memory.
            let memory =
                if peers_raise { Memory::shared(length)? } else { Memory::anonymous(length)? };
            let memory = peer.memory.insert(Arc::new(memory)).clone();
            self.inner()?.register(key, &memory)?;
        }
        Ok(())
    }

    /// Activates the link if a peer has filled the first slot.
    fn notice(&mut self) {
        let value = |lane: LaneId| self.group.lanes.value(lane);
        self.is_active |= self.watched.iter().any(|(_, lane)| value(*lane) > 0);
    }

    /// Hands the inner link's events to the engine.
    fn pass_events(&mut self, sink: &mut Sink) {
        sink.held |= std::mem::take(&mut self.events.held);
        if self.events.is_empty() {
            return;
        }
        sink.completed.append(&mut self.events.completed);
        sink.failures.append(&mut self.events.failures);
        sink.lost.append(&mut self.events.lost);
        sink.raised.append(&mut self.events.raised);
    }

    fn peer(&mut self, peer: Rank) -> Result<&mut StagedPeer> {
        let unknown = || Error::Unknown { what: "rank", number: peer.0.into() };
        self.peers.get_mut(peer).ok_or_else(unknown)
    }

    /// The copy engines, opened by the first call.
    fn engine(&mut self) -> std::result::Result<&mut dyn CopyEngine, String> {
        if self.engine.is_none() {
            let engine = self.engine.insert((self.open)()?);
            if self.engines_only {
                engine.use_copy_engines_only();
            }
        }
        Ok(&mut **self.engine.as_mut().ok_or("there is no copy engine")?)
    }

    /// True if only time makes the next poll due: copies are in flight, or the inner link was full.
    fn is_busy(&self) -> bool {
        let raises = |peer: &StagedPeer| {
            let unraised = |part: &super::peer::OutgoingPart| {
                self.peers_raise && part.is_freed && part.stage == Stage::Posted { pending: 0 }
            };
            peer.outgoing.iter().flatten().any(unraised)
        };
        let mut peers = self.peers.values();
        peers.any(|peer| {
            let waits = !peer.ready.is_empty() || peer.owed > 0 || peer.loss.is_some();
            peer.has_copies() || waits || raises(peer)
        })
    }

    /// True if a peer has filled or freed slots since the last poll.
    fn has_news(&self) -> bool {
        let value = |lane: Lane| self.group.lanes.value(lane.id());
        let filled = |peer: &StagedPeer| {
            let mut slots = 0..peer.shape.slots as usize;
            slots.any(|slot| peer.arrived.is_behind(slot, value(peer.ours.filled(slot))))
        };
        let freed = |peer: &StagedPeer| {
            peer.has_outgoing() && peer.sent.is_behind(value(peer.ours.freed()))
        };
        self.peers.values().any(|peer| !peer.is_refused && (filled(peer) || freed(peer)))
    }

    /// True if parts have not left for peers that are there, or copies are in flight.
    fn has_undelivered(&self) -> bool {
        let is_here = |peer: &StagedPeer| !peer.is_loss_reported && !peer.is_refused;
        let undelivered = |part: &super::peer::OutgoingPart| {
            self.peers_raise || part.stage != Stage::Posted { pending: 0 }
        };
        self.peers.values().any(|peer| {
            let waits = peer.owed > 0 || peer.outgoing.iter().flatten().any(undelivered);
            peer.has_incoming() || is_here(peer) && waits
        })
    }

    /// Ends a peer's copies. Memory that some may still touch is leaked.
    fn end_copies(&mut self, rank: Rank, mut peer: StagedPeer, deadline: Time) {
        if peer.drain(self.engine.as_deref_mut(), deadline) {
            return;
        }
        log::error!(
            "copies for {rank} did not complete within {:?}: the device is stuck; the memory is leaked \
             until this process ends",
            self.config.drain_timeout
        );
        // It owns the slots, the pin, and handles on the regions that the copies name.
        std::mem::forget(peer);
    }
}

impl Link for StagedLink {
    fn kind(&self) -> ProviderKind {
        self.inner.as_ref().map_or(ProviderKind::Tcp, |inner| inner.kind())
    }

    fn address(&self) -> Vec<u8> {
        self.own_address().encode()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        self.pair(theirs).map(|route| route.rule())
    }

    fn describe(&self, address: &[u8]) -> String {
        let Some(link) = &self.inner else { return String::new() };
        match StagedAddress::decode(address) {
            Some(address) if self.passes_keys => link.describe(address.inner),
            Some(address) => format!("{} with WEFT_STAGED=1", link.describe(address.inner)),
            None if self.passes_keys => {
                format!("{} outside the staging wrapper", link.describe(address))
            }
            None => link.describe(address),
        }
    }

    fn introduce(&mut self, peer: Rank, address: &[u8]) -> Result<Vec<u8>> {
        let malformed =
            || Error::Malformed { peer, what: "an address", detail: "not staged".into() };
        let route = self.pair(address).ok_or_else(malformed)?;
        let StagedRoute { shape, inner, .. } = route;
        if !route.has_slots {
            return self.inner()?.introduce(peer, inner);
        }
        let first = self.group.lanes.issue(peer, SlotLanes::count(shape.slots))?;
        let lanes = SlotLanes { first, slots: shape.slots };
        self.introduced.insert(peer, (shape, lanes));
        Ok(put_introduction(lanes, &self.inner()?.introduce(peer, inner)?))
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        let mut inner = Vec::with_capacity(peers.len());
        let mut agreed = Vec::with_capacity(peers.len());
        for &Introduction { peer, address, message } in peers {
            let malformed =
                || Error::Malformed { peer, what: "an introduction", detail: "not staged".into() };
            let address = StagedAddress::decode(address).ok_or_else(malformed)?.inner;
            let Some((shape, ours)) = self.introduced.remove(peer) else {
                inner.push(Introduction { peer, address, message });
                continue;
            };
            let (theirs, message) =
                take_introduction(message, shape.slots).ok_or_else(malformed)?;
            inner.push(Introduction { peer, address, message });
            agreed.push((peer, shape, ours, theirs));
        }
        self.inner()?.connect(&inner, limit)?;
        self.has_routes = !peers.is_empty();
        for (peer, shape, ours, theirs) in agreed {
            self.watched.push((peer, ours.filled(0).id()));
            self.peers.insert(peer, StagedPeer::new(shape, ours, theirs));
        }
        Ok(())
    }

    fn take_inner(&mut self) -> Option<Box<dyn Link>> {
        // Without it, GPU memory is refused where it is registered, with the remedy.
        let mode = self.config.mode;
        let may_grant = mode.has_gpus() && (self.has_routes || self.group.size == 1);
        let is_needed = mode == StagedMode::Always || may_grant || !self.peers.is_empty();
        if is_needed { None } else { self.inner.take() }
    }

    fn allocate(&mut self, device: u32, length: usize) -> Option<Result<Memory>> {
        if !self.config.mode.has_gpus() {
            return self.inner.as_mut()?.allocate(device, length);
        }
        let provider = self.kind();
        let memory = self.engine().and_then(|engine| engine.allocate(device, length));
        Some(memory.map_err(|detail| Error::Provider { provider, detail }))
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        match memory.kind() {
            MemoryKind::Host => {
                let inner = self.inner_key(key);
                self.inner()?.register(inner, memory)?;
            }
            MemoryKind::Device(_) if !self.config.mode.has_gpus() => {
                return self.inner()?.register(key, memory);
            }
            MemoryKind::Device(device) => {
                let provider = self.kind();
                let known = self.engine().and_then(|engine| engine.prepare(device));
                known.map_err(|detail| Error::Unusable { provider, key, detail })?;
                self.is_active = true;
            }
        }
        self.regions.insert(key, memory.clone());
        Ok(())
    }

    fn grant(&mut self, key: RegionKey, peer: Rank, range: Range<u64>) -> Result<Vec<u8>> {
        if self.peers.get(peer).is_none() {
            let is_in_gpu = self.regions.get(key).is_some_and(|memory| memory.host().is_none());
            if is_in_gpu {
                let detail = format!("{peer} stages no GPU memory; leave WEFT_STAGED unset there");
                return Err(Error::Unusable { provider: self.kind(), key, detail });
            }
            let key = self.inner_key(key);
            return self.inner()?.grant(key, peer, range);
        }
        self.make_slots(peer)?;
        let slots = self.peer(peer)?.shape.bytes();
        let slots_key = StagedLink::slots_key(self.passes_keys, peer);
        let slots = self.inner()?.grant(slots_key, peer, 0..slots)?;
        let memory = self.regions.get(key);
        let memory =
            memory.ok_or_else(|| Error::Unknown { what: "region", number: key.0.into() })?;
        let entry = match memory.kind() {
            MemoryKind::Device(_) => None,
            MemoryKind::Host => {
                let key = self.inner_key(key);
                Some(self.inner()?.grant(key, peer, range.clone())?)
            }
        };
        self.peer(peer)?.granted.add(key.0, range.clone());
        Ok(StagedGrant { inner: entry.as_deref(), range, slots: &slots }.encode())
    }

    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        if self.peers.get(peer).is_none() {
            let inner = self.inner_key(key);
            return self.inner()?.import(peer, inner, length, entry, limit);
        }
        let grant = StagedGrant::decode(entry).filter(|grant| grant.range.end <= length);
        let grant = grant.filter(|_| key.0.checked_add(self.group.size).is_some());
        let grant = grant.ok_or_else(|| Error::Malformed {
            peer,
            what: "a staged grant",
            detail: format!("expected a range within {length} bytes"),
        })?;
        let (me, inner_key) = (self.group.rank, self.inner_key(key));
        let known = self.peer(peer)?;
        let slots = known.shape.bytes();
        if !known.has_slots {
            // A mapping is the whole memory, which has slots for both directions.
            let slots_key = StagedLink::slots_key(self.passes_keys, me);
            self.inner()?.import(peer, slots_key, 2 * slots, grant.slots, limit)?;
            self.make_slots(peer)?;
            self.peer(peer)?.has_slots = true;
        }
        if let Some(entry) = grant.inner {
            self.inner()?.import(peer, inner_key, length, entry, limit)?;
        }
        let known = self.peer(peer)?;
        if grant.inner.is_some() {
            known.in_gpus.remove(&key);
        } else {
            known.in_gpus.insert(key);
        }
        known.imported.add(key.0, grant.range);
        self.is_active |= grant.inner.is_none();
        Ok(())
    }

    fn deregister(&mut self, key: RegionKey) {
        let inner = self.inner_key(key);
        if self.regions.remove(key).is_some_and(|memory| memory.host().is_some())
            && let Ok(link) = self.inner()
        {
            link.deregister(inner);
        }
        for peer in self.peers.values_mut() {
            peer.granted.remove(key.0);
        }
    }

    fn remove_remote(&mut self, peer: Rank, key: RegionKey) {
        let inner = self.inner_key(key);
        let is_in_gpu = self.peers.get_mut(peer).is_some_and(|known| {
            known.imported.remove(key.0);
            known.in_gpus.remove(&key)
        });
        if !is_in_gpu && let Ok(link) = self.inner() {
            link.remove_remote(peer, inner);
        }
    }

    fn peers_raise(&self) -> bool {
        self.peers_raise
    }

    fn post(
        &mut self,
        work: &WorkRequest<'_>,
        sink: &mut Sink,
    ) -> std::result::Result<PostStatus, String> {
        if let Some(inner) = &mut self.inner
            && !self.is_active
            && self.passes_keys
        {
            return inner.post(work, sink);
        }
        if self.is_staged(work) {
            return self.stage(work);
        }
        let size = if self.passes_keys { 0 } else { self.group.size };
        let StagedLink { inner: Some(inner), pages, events, .. } = self else {
            return Err("the link is closed".into());
        };
        pages.clear();
        // Empty pages may name regions that the inner link does not know.
        pages.extend(work.pages.iter().filter(|page| page.length > 0).map(|page| Page {
            source: RegionKey(page.source.0.saturating_add(size)),
            destination: RegionKey(page.destination.0.saturating_add(size)),
            ..*page
        }));
        inner.post(&WorkRequest { pages, ..*work }, events)
    }

    fn released(&mut self, peer: Rank, lane: Lane) {
        if let Some(inner) = &mut self.inner {
            inner.released(peer, lane);
        }
    }

    fn flush(&mut self, sink: &mut Sink) {
        if let Some(inner) = &mut self.inner
            && !self.is_active
        {
            inner.flush(&mut self.events);
            return self.pass_events(sink);
        }
        if let Some(engine) = &mut self.engine {
            for peer in self.peers.values_mut() {
                peer.gathers.seal(&mut **engine);
            }
        }
        self.send_ready(sink);
        self.ticker.set(self.is_busy());
    }

    fn hold(&mut self, peer: Rank, token: u64) -> u32 {
        self.inner.as_mut().map_or(0, |inner| inner.hold(peer, token))
    }

    fn poll(&mut self, now: Time, sink: &mut Sink) {
        self.ticker.clear();
        if let Some(inner) = &mut self.inner {
            inner.poll(now, &mut self.events);
        }
        if !self.is_active {
            self.notice();
            if !self.is_active {
                return self.pass_events(sink);
            }
        }
        self.take_events(sink);
        self.receive(sink);
        self.finish_gathers(sink);
        self.report(sink);
        self.send_ready(sink);
        self.ticker.set(self.is_busy());
    }

    fn has_unread(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.has_unread())
    }

    fn use_copy_engines_only(&mut self) {
        self.engines_only = true;
        if let Some(engine) = &mut self.engine {
            engine.use_copy_engines_only();
        }
        if let Some(inner) = &mut self.inner {
            inner.use_copy_engines_only();
        }
    }

    fn expect_messages(&mut self) {
        if let Some(inner) = &mut self.inner {
            inner.expect_messages();
        }
    }

    fn expect_write(&mut self, peer: Rank) {
        if let Some(inner) = &mut self.inner {
            inner.expect_write(peer);
        }
    }

    fn share_wake(&mut self) -> bool {
        self.inner.as_mut().is_none_or(|inner| inner.share_wake())
    }

    /// Slots are filled and freed by raises in the lane table, which wakes the engine.
    fn prepare_sleep(&mut self) -> bool {
        if !self.is_active {
            self.notice();
        }
        let is_idle = self.events.is_empty() && !(self.is_active && self.has_news());
        is_idle && self.inner.as_mut().is_none_or(|inner| inner.prepare_sleep())
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let inner = self.inner.as_ref().map(|inner| inner.descriptors());
        inner.into_iter().flatten().chain([self.ticker.descriptor()]).collect()
    }

    fn next_deadline(&self) -> Option<Time> {
        self.inner.as_ref()?.next_deadline()
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        let staged = self.peers.remove(peer);
        self.watched.retain(|(watched, _)| *watched != peer);
        if let Some(inner) = &mut self.inner {
            inner.fence(peer, &mut self.events);
        }
        self.take_events(sink);
        if let Some(mut staged) = staged {
            for part in staged.outgoing.iter().flatten().filter(|part| !part.is_reported) {
                sink.failed(part.token, format!("{peer} was fenced"));
            }
            staged.ready.clear();
            self.end_copies(peer, staged, clock::now().after(self.config.drain_timeout));
            let key = StagedLink::slots_key(self.passes_keys, peer);
            if let Some(inner) = &mut self.inner {
                inner.deregister(key);
            }
        }
        self.ticker.set(self.is_busy());
    }
}

impl Drop for StagedLink {
    /// Sends what was posted, and completes copies, before the inner link closes.
    fn drop(&mut self) {
        let mut sink = Sink::default();
        let begin = clock::now();
        let deadline = begin.after(LINGER);
        while self.has_undelivered() && clock::now() < deadline {
            self.poll(clock::now(), &mut sink);
            std::thread::sleep(POLL_INTERVAL);
        }
        if self.peers_raise
            && let Some(inner) = &mut self.inner
        {
            for (rank, peer) in self.peers.iter_mut() {
                // Without it the peer waits until a deadline.
                let _ = inner.post(&signal(rank, peer.theirs.left()), &mut sink);
            }
            inner.flush(&mut sink);
        }
        let deadline = begin.after(self.config.drain_timeout);
        for rank in (0..self.group.size).map(Rank) {
            if let Some(peer) = self.peers.remove(rank) {
                self.end_copies(rank, peer, deadline);
            }
        }
        // It may still send what it has taken.
        self.inner = None;
    }
}
