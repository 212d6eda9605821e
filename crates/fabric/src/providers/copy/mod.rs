//! Ranks on one host with device memory. Copy engines, driven from the host, move device memory pages
//! without using an SM; lists of short pages are moved by a kernel on a few SMs. Plain stores move host
//! memory pages, as over shm: both providers use `local`.
//!
//! A post adds copies to one of the copying device's queues (a stream), directly into the peer's mapped
//! memory. A flush records one event behind all copies posted to a peer since the last. A poll that finds
//! the event complete raises the lanes for the parts before it and reports them complete. Posts without
//! device pages (signals, credits) complete on return; they may overtake copies, as any two posts may.
//!
//! **Bytes are visible when the lane has risen.** An event is complete when the copies before it on the
//! stream are: not when the sources were read, but when every write has been performed at the
//! destination, in device or host memory. Only after this process has observed that does it raise the
//! lane, with a release store in memory that the owner maps. The owner acquires the lane, which orders
//! later accesses after the bytes: by a kernel that it launches, by a copy that it starts, or by the CPU
//! for host memory. A kernel that was already running when the lane rose is outside that order and must
//! not read them.
//!
//! A source must be filled before the write is posted: the caller waits for the stream work that produces
//! the bytes.
//!
//! Copies cannot be cancelled. [`Link::fence`] waits for those in flight up to a time limit; beyond it the
//! device counts as stuck, and all memory that the copies may touch is kept until the process ends.
//!
//! - this file: regions, posts, polls
//! - `pages.rs`: a post's pages as stores and copies
//! - `peer_devices.rs`: per-peer device state: reachable regions and mappings
//! - `outbox.rs`: parts in flight toward one peer
//! - `pinned.rs`: host memory pinned for copy engines
//! - `engine.rs`: the copy engine trait; `cuda.rs` and `twin.rs` implement it
//! - `page_kernel.rs`, `pages.cu`: page lists as kernel launches
//! - `ticker.rs`: the timer that wakes an engine with copies in flight

pub(super) mod cuda;
mod engine;
pub(super) mod outbox;
mod page_kernel;
mod pages;
mod peer_devices;
pub(super) mod pinned;
pub(super) mod ticker;
mod twin;

pub(crate) use page_kernel::sms_from_env;

pub use engine::{CopyEngine, DeviceUuid, EventId, PageCopy, QueueId};
pub use twin::{Twin, TwinControls};

use crate::clock;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::id_map::PeerMap;
use crate::link::{Introduction, Link, Membership, PostStatus, RouteRule, Sink, WorkRequest};
use crate::local::{ENTRY_BYTES, LocalPeers, WaitLimit};
use crate::memory::{Memory, MemoryKind};
use crate::types::{Page, ProviderKind, RegionKey, Time};
use cuda::Cuda;
use outbox::CopyPart;
use peer_devices::{DeviceRegion, PeerDevices};
use pinned::PinnedRegions;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;
use ticker::Ticker;
use weft_control::Rank;

/// Copies in flight toward one peer; above, posts find the queue full.
const MAX_COPIES: usize = 1024;
/// Pages that are moved together count as one copy by this number.
const PAGES_PER_COPY: usize = 32;
/// Time limit for copies in flight when a peer is fenced or the engine is dropped.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Sleep between two polls during that wait.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// [`CopyDevice`] configuration.
#[derive(Clone, Debug)]
pub struct CopyConfig {
    /// Host name, as for shm.
    pub host_id: String,
    /// Device implementation.
    pub devices: CopyBackend,
}

/// Implementation for device memory and copy engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyBackend {
    /// GPUs that CUDA shows this process.
    #[default]
    Cuda,
    /// Host memory in place of devices, for tests: see [`Twin`].
    Twin {
        /// Seed for the completion order.
        seed: u64,
    },
}

impl CopyBackend {
    /// Checks that this machine has such devices.
    ///
    /// # Errors
    /// [`Error::Provider`] if there is no driver for them.
    pub fn check(self) -> Result<()> {
        self.open().map(drop).map_err(provider_error)
    }

    /// Opens the copy engines.
    ///
    /// # Errors
    /// The cause, if there is no driver for such devices.
    pub(super) fn open(self) -> std::result::Result<Box<dyn CopyEngine>, String> {
        Ok(match self {
            CopyBackend::Twin { seed } => Box::new(Twin::new(seed)),
            CopyBackend::Cuda => Box::new(Cuda::new(sms_from_env()?)?),
        })
    }
}

/// Constructor for copy engines, called once for each link.
type OpenEngine = dyn Fn() -> Result<Box<dyn CopyEngine>> + Send + Sync;

/// This host's copy engines.
pub struct CopyDevice {
    host_id: String,
    open: Box<OpenEngine>,
    depth: usize,
    drain_timeout: Duration,
}

impl CopyDevice {
    /// Opens the configured copy engines.
    ///
    /// # Errors
    /// [`Error::Provider`] if there is no driver for such devices.
    pub fn new(config: CopyConfig) -> Result<CopyDevice> {
        let open = move || config.devices.open().map_err(provider_error);
        open()?;
        Ok(CopyDevice::over(open, &config.host_id))
    }

    /// Copy engines that `open` constructs for each link.
    pub fn over(
        open: impl Fn() -> Result<Box<dyn CopyEngine>> + Send + Sync + 'static,
        host_id: &str,
    ) -> CopyDevice {
        let (host_id, open) = (host_id.to_owned(), Box::new(open));
        CopyDevice { host_id, open, depth: MAX_COPIES, drain_timeout: DRAIN_TIMEOUT }
    }

    /// Replaces the limits: copies in flight toward a peer, and the time limit for them when the peer is
    /// fenced.
    pub fn with_limits(mut self, depth: usize, drain_timeout: Duration) -> CopyDevice {
        (self.depth, self.drain_timeout) = (depth.max(1), drain_timeout);
        self
    }
}

impl Device for CopyDevice {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Copy
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let engine = (self.open)()?;
        let backend = engine.name().as_bytes().to_vec();
        Ok(Box::new(CopyLink {
            engine,
            local: LocalPeers::open(ProviderKind::Copy, &self.host_id, &backend)?,
            group,
            peers: PeerMap::default(),
            home: None,
            pinned: PinnedRegions::default(),
            ticker: Ticker::new()?,
            depth: self.depth,
            drain_timeout: self.drain_timeout,
        }))
    }
}

/// One group's copies.
struct CopyLink {
    engine: Box<dyn CopyEngine>,
    local: LocalPeers,
    group: Membership,
    peers: PeerMap<PeerDevices>,
    /// Device that holds our first device region: it copies from host sources to device memory.
    home: Option<u32>,
    /// Pins on our host memory.
    pinned: PinnedRegions,
    ticker: Ticker,
    depth: usize,
    drain_timeout: Duration,
}

impl CopyLink {
    fn devices(&mut self, peer: Rank) -> Option<&mut PeerDevices> {
        self.peers.get_mut(peer)
    }

    /// Drops the device mapping and the pin on a peer's region.
    fn drop_device_region(&mut self, peer: Rank, key: RegionKey) {
        let Some(devices) = self.devices(peer) else { return };
        devices.pinned.remove_remote(key);
        devices.regions.remove(key);
    }

    /// Raises the lanes for parts whose copies are complete, and reports them.
    fn complete_finished(&mut self, sink: &mut Sink) {
        let CopyLink { engine, local, peers, .. } = self;
        for (peer, devices) in peers.iter_mut().filter(|(_, devices)| !devices.outbox.is_empty()) {
            devices.outbox.seal(&mut **engine);
            devices.outbox.take_finished(&mut **engine, |part| match part.failure {
                Some(why) => sink.failed(part.token, why),
                // All bytes are in the peer's memory: see the module's page.
                None => match local.raise(peer, part.lane) {
                    Some(()) => sink.done(part.token),
                    None => sink.failed(part.token, "unknown lane of the peer"),
                },
            });
        }
    }

    fn is_busy(&self) -> bool {
        self.peers.values().any(|devices| !devices.outbox.is_empty())
    }

    /// Leaks all memory that copies toward a peer may touch.
    fn leak(&mut self, peer: Rank, devices: PeerDevices) {
        log::error!(
            "copies to {peer} did not complete within {:?}: the device is stuck; their memory is \
             leaked until this process ends",
            self.drain_timeout
        );
        let touched: Vec<Arc<Memory>> =
            self.local.memories().chain(self.local.mapped_of(peer)).cloned().collect();
        std::mem::forget((touched, devices, std::mem::take(&mut self.pinned)));
    }
}

/// Weight of pages that collect for a launch. Few of them are copies after all, and a launch counts as one copy at
/// least.
fn weight_together(pages: usize) -> usize {
    match pages {
        0 => 0,
        _ if pages < page_kernel::SHORTEST_LIST => pages * PAGES_PER_COPY,
        _ => pages.max(PAGES_PER_COPY),
    }
}

pub(crate) fn provider_error(detail: String) -> Error {
    Error::Provider { provider: ProviderKind::Copy, detail }
}

impl Link for CopyLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Copy
    }

    fn address(&self) -> Vec<u8> {
        self.local.address()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        let rule = RouteRule { ordered: false, ..RouteRule::DEFERRED };
        self.local.reaches(theirs).then_some(rule)
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        self.local.connect(&self.group, peers, limit)?;
        for Introduction { peer, .. } in peers {
            self.peers.insert(*peer, PeerDevices::default());
        }
        Ok(())
    }

    fn allocate(&mut self, device: u32, length: usize) -> Option<Result<Memory>> {
        Some(self.engine.allocate(device, length).map_err(provider_error))
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        if let MemoryKind::Device(device) = memory.kind() {
            self.engine.prepare(device).map_err(provider_error)?;
            self.home.get_or_insert(device);
        }
        self.local.register(key, memory)
    }

    fn grant(&mut self, key: RegionKey, peer: Rank, _range: Range<u64>) -> Result<Vec<u8>> {
        let mut entry = self.local.grant(key, peer)?.to_vec();
        if let Some(MemoryKind::Device(device)) = self.local.memory(key).map(|memory| memory.kind())
        {
            entry.extend_from_slice(&self.engine.uuid(device).map_err(provider_error)?);
        }
        Ok(entry)
    }

    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        let malformed = || Error::Malformed {
            peer,
            what: "a region",
            detail: format!("{} bytes for {length}", entry.len()),
        };
        let (serial, uuid) = entry.split_at_checked(ENTRY_BYTES).ok_or_else(malformed)?;
        if uuid.is_empty() {
            // A known region keeps the mapping; another one replaces it.
            if self.local.is_mapped(peer, key, entry) {
                return Ok(());
            }
            self.drop_device_region(peer, key);
            return self.local.import(peer, key, length, entry, limit);
        }
        let uuid: DeviceUuid = uuid.try_into().map_err(|_| malformed())?;
        let serial = serial.try_into().map(u64::from_le_bytes).map_err(|_| malformed())?;
        let length = usize::try_from(length).map_err(|_| malformed())?;
        let known = self.devices(peer).and_then(|devices| devices.regions.get(key));
        if known.is_some_and(|known| known.serial == serial) {
            return Ok(());
        }
        let descriptor = self.local.receive(peer, key, serial, limit)?;
        let home = self.home.or_else(|| self.engine.find(uuid)).unwrap_or(0);
        let mut region = DeviceRegion { serial, length, home, descriptor, mapped: Vec::new() };
        // Maps now, so that an error is reported before the first write.
        region.mapped_for(&mut *self.engine, home).map_err(|why| {
            provider_error(format!(
                "region {} of {peer} cannot be mapped on device {home}: {why}",
                key.0
            ))
        })?;
        self.remove_remote(peer, key);
        let devices = self.devices(peer);
        let devices =
            devices.ok_or_else(|| Error::Unknown { what: "rank", number: peer.0.into() })?;
        devices.regions.insert(key, region);
        Ok(())
    }

    fn deregister(&mut self, key: RegionKey) {
        self.pinned.remove_remote(key);
        self.local.deregister(key);
    }

    fn remove_remote(&mut self, peer: Rank, key: RegionKey) {
        self.drop_device_region(peer, key);
        self.local.remove_remote(peer, key);
    }

    fn post(
        &mut self,
        work: &WorkRequest<'_>,
        _sink: &mut Sink,
    ) -> std::result::Result<PostStatus, String> {
        let WorkRequest { token, peer, lane, .. } = *work;
        let mut together = 0;
        let weight = |page: &Page| match self.copying_device(peer, page) {
            Some(device) if self.is_gathered(device, page) => {
                together += 1;
                0
            }
            Some(_) => PAGES_PER_COPY,
            None => 0,
        };
        let apart: usize = work.pages.iter().filter(|page| page.length > 0).map(weight).sum();
        let copies = apart + weight_together(together);
        let depth = self.depth.saturating_mul(PAGES_PER_COPY);
        let devices = self.devices(peer).ok_or("it is not connected over copy")?;
        if copies > 0 && !devices.outbox.has_room(copies, depth) {
            return Ok(PostStatus::Full);
        }
        match self.enqueue(work) {
            (0, Some(why)) => Err(why),
            (0, None) => {
                self.local.raise(peer, lane).ok_or("unknown lane of the peer")?;
                Ok(PostStatus::Done)
            }
            // A part is not reported as failed while some of the pages are still read.
            (_, failure) => {
                let devices = self.devices(peer).ok_or("it is not connected over copy")?;
                devices.outbox.add(CopyPart { token, lane, failure }, copies);
                Ok(PostStatus::InFlight)
            }
        }
    }

    fn flush(&mut self, _sink: &mut Sink) {
        let CopyLink { engine, peers, ticker, .. } = self;
        for devices in peers.values_mut().filter(|devices| !devices.outbox.is_empty()) {
            devices.outbox.seal(&mut **engine);
            ticker.set(true);
        }
    }

    fn poll(&mut self, _now: Time, sink: &mut Sink) {
        self.local.flush();
        if self.is_busy() {
            self.ticker.clear();
            self.complete_finished(sink);
            self.ticker.set(self.is_busy());
        }
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        let devices = self.peers.remove(peer);
        if let Some(mut devices) = devices {
            let cut = |part: CopyPart, sink: &mut Sink| {
                sink.failed(part.token, format!("{peer} was fenced"));
            };
            devices.outbox.seal(&mut *self.engine);
            let deadline = clock::now().after(self.drain_timeout);
            while !devices.outbox.is_empty() && clock::now() < deadline {
                devices.outbox.take_finished(&mut *self.engine, |part| cut(part, sink));
                std::thread::sleep(POLL_INTERVAL);
            }
            if devices.outbox.is_empty() {
                devices.outbox.close(&mut *self.engine);
            } else {
                devices.outbox.abandon(|part| cut(part, sink));
                self.leak(peer, devices);
            }
        }
        self.ticker.set(self.is_busy());
        self.local.disconnect(peer);
    }

    fn peers_raise(&self) -> bool {
        true
    }

    fn use_copy_engines_only(&mut self) {
        self.engine.use_copy_engines_only();
    }

    fn share_wake(&mut self) -> bool {
        self.local.share_wake(&self.group.lanes)
    }

    /// Ticks while copies are in flight. Peers' writes raise lanes without this link.
    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.ticker.descriptor()]
    }
}

impl Drop for CopyLink {
    /// Completes posted copies before the link closes: lanes rise, as over shm.
    fn drop(&mut self) {
        let mut sink = Sink::default();
        let deadline = clock::now().after(self.drain_timeout);
        while self.is_busy() && clock::now() < deadline {
            self.complete_finished(&mut sink);
            std::thread::sleep(POLL_INTERVAL);
        }
        for peer in (0..self.group.size).map(Rank) {
            self.fence(peer, &mut sink);
        }
        self.pinned = PinnedRegions::default();
    }
}
