//! Ranks of one host and their devices: pages of device memory travel by copy engines, which the host
//! engine drives, so that no multiprocessor takes part; pages of host memory by plain stores, as over
//! shm: both providers stand on [`crate::local`].
//!
//! A post puts its copies into a queue (a stream) of the device that copies, straight into the peer's
//! memory, which is mapped here; a flush puts one mark (an event) behind all that was posted to a peer
//! since the last. A poll that finds the mark passed raises the lanes of the parts before it and reports
//! them as complete. Posts without device pages (signals, credits) are done when they return; they may
//! overtake copies, as any two posts may.
//!
//! **Why the bytes are visible when the lane has risen.** An event is complete when the copies before it
//! on its stream are: not when their sources were read, but when every write has been performed at its
//! destination, in the memory of whichever device or host. Only after this process has seen that does it
//! raise the lane, with a release store in memory that the owner maps. The owner acquires the lane, and
//! what it does then comes after: a kernel it launches reads the bytes, as does a copy that it starts,
//! or its CPU if they are in host memory. A kernel that was running already when the lane rose has no
//! part in that order and must not read them.
//!
//! What a source holds must be there before the write is posted: work on a stream of the user that
//! produces it must have been waited for.
//!
//! Copies cannot be recalled. [`Link::fence`] waits for those under way, a bounded time; if they
//! last longer the device is stuck, and all memory that they may touch is kept until the process ends.
//!
//! - this file: regions, posting, polling
//! - `pages.rs`: from the pages of a post to stores and copies
//! - `peer_devices.rs`: per-peer device state: reachable regions and their mappings
//! - `outbox.rs`: the parts under way toward one peer
//! - `pins.rs`: host memory that is pinned for copy engines
//! - `copier.rs`: the trait of copy engines; `cuda.rs` and `twin.rs` implement it
//! - `ticker.rs`: the timer that wakes an engine which waits for copies

mod copier;
mod cuda;
mod outbox;
mod pages;
mod peer_devices;
mod pins;
mod ticker;
mod twin;

pub use copier::{Copier, Identity, Mark, Queue, Why};
pub use twin::{Controls, Twin};

use crate::clock;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Membership, Posted, RouteRule, Sink, Work};
use crate::local::{ENTRY_BYTES, LocalPeers, WaitLimit};
use crate::memory::{Memory, Place};
use crate::types::{Page, ProviderKind, RegionKey, Time};
use cuda::Cuda;
use outbox::Part;
use peer_devices::{DeviceRegion, PeerDevices};
use pins::Pins;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;
use ticker::Ticker;
use weft_control::Rank;

/// Copies that may be under way toward one peer; then posts find the queue full.
const DEPTH: usize = 1024;
/// For how long copies that were under way are waited for when a peer is cut off or the engine goes.
const PATIENCE: Duration = Duration::from_secs(5);
/// Sleep between two polls of copies that are waited for.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// How to open the provider.
#[derive(Clone, Debug)]
pub struct CopyConfig {
    /// Names this host, as for shm.
    pub host_id: String,
    /// Which devices.
    pub devices: Devices,
}

/// What has the memory and the copy engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Devices {
    /// The GPUs that CUDA shows this process.
    #[default]
    Cuda,
    /// Host memory in their place, for tests: see [`Twin`].
    Twin {
        /// Says when copies complete.
        seed: u64,
    },
}

/// Opens copy engines, once for each link.
type OpenCopier = dyn Fn() -> Result<Box<dyn Copier>> + Send + Sync;

/// The copy engines of this host.
pub struct CopyDevice {
    host_id: String,
    open: Box<OpenCopier>,
    depth: usize,
    patience: Duration,
}

impl CopyDevice {
    /// The copy engines that `config` names.
    ///
    /// # Errors
    /// [`Error::Provider`] if there is no driver for such devices.
    pub fn new(config: CopyConfig) -> Result<CopyDevice> {
        let open = move || -> Result<Box<dyn Copier>> {
            Ok(match config.devices {
                Devices::Twin { seed } => Box::new(Twin::new(seed)),
                Devices::Cuda => Box::new(Cuda::new().map_err(failed)?),
            })
        };
        open()?;
        Ok(CopyDevice::over(open, &config.host_id))
    }

    /// The copy engines that `open` opens for each link.
    pub fn over(
        open: impl Fn() -> Result<Box<dyn Copier>> + Send + Sync + 'static,
        host_id: &str,
    ) -> CopyDevice {
        let (host_id, open) = (host_id.to_owned(), Box::new(open));
        CopyDevice { host_id, open, depth: DEPTH, patience: PATIENCE }
    }

    /// The same with other limits: copies that may be under way toward a peer, and for how long they
    /// are waited for when the peer is cut off.
    pub fn with_limits(mut self, depth: usize, patience: Duration) -> CopyDevice {
        (self.depth, self.patience) = (depth.max(1), patience);
        self
    }
}

impl Device for CopyDevice {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Copy
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let copier = (self.open)()?;
        let flavour = copier.name().as_bytes().to_vec();
        Ok(Box::new(CopyLink {
            copier,
            local: LocalPeers::open(ProviderKind::Copy, &self.host_id, &flavour)?,
            group,
            peers: Vec::new(),
            home: None,
            pins: Pins::default(),
            ticker: Ticker::new()?,
            depth: self.depth,
            patience: self.patience,
        }))
    }
}

/// One group's copies.
struct CopyLink {
    copier: Box<dyn Copier>,
    local: LocalPeers,
    group: Membership,
    peers: Vec<Option<PeerDevices>>,
    /// The device of our first device region: it copies what has no device at its source.
    home: Option<u32>,
    /// Of our host memory.
    pins: Pins,
    ticker: Ticker,
    depth: usize,
    patience: Duration,
}

impl CopyLink {
    fn devices(&mut self, peer: Rank) -> Option<&mut PeerDevices> {
        self.peers.get_mut(peer.0 as usize)?.as_mut()
    }

    /// Forgets what is held for a peer's region beside its mapping as host memory.
    fn forget_device(&mut self, peer: Rank, key: RegionKey) {
        let Some(devices) = self.devices(peer) else { return };
        devices.pins.forget(key);
        if let Some(slot) = devices.regions.get_mut(key.0 as usize) {
            *slot = None;
        }
    }

    /// Raises the lanes of the parts that are over and reports them.
    fn look(&mut self, sink: &mut Sink) {
        let CopyLink { copier, local, peers, .. } = self;
        for (number, devices) in peers.iter_mut().enumerate() {
            let Some(devices) = devices.as_mut().filter(|devices| !devices.outbox.is_empty())
            else {
                continue;
            };
            devices.outbox.seal(&mut **copier);
            devices.outbox.take_over(&mut **copier, |part| match part.failure {
                Some(why) => sink.failed(part.token, why),
                // Every byte is in the peer's memory now: see the module's page.
                None => match local.raise(Rank(number as u32), part.lane) {
                    Some(()) => sink.done(part.token),
                    None => sink.failed(part.token, "it has no such lane"),
                },
            });
        }
    }

    fn is_busy(&self) -> bool {
        self.peers.iter().flatten().any(|devices| !devices.outbox.is_empty())
    }

    /// Keeps all that copies toward a peer may touch, until the process ends.
    fn keep_forever(&mut self, peer: Rank, devices: PeerDevices) {
        log::error!(
            "copies to {peer} did not end within {:?}: the device is stuck, and the memory that \
             they read and write is kept until this process ends",
            self.patience
        );
        let touched: Vec<Arc<Memory>> =
            self.local.memories().chain(self.local.mapped_of(peer)).cloned().collect();
        std::mem::forget((touched, devices, std::mem::take(&mut self.pins)));
    }
}

fn failed(detail: Why) -> Error {
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
        let rule = RouteRule { ordered: false, ..RouteRule::LATER };
        self.local.reaches(theirs).then_some(rule)
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        self.local.connect(&self.group, peers, limit)?;
        self.peers.resize_with(self.group.size as usize, || None);
        for Introduction { peer, .. } in peers {
            if let Some(slot) = self.peers.get_mut(peer.index()) {
                *slot = Some(PeerDevices::default());
            }
        }
        Ok(())
    }

    fn allocate(&mut self, device: u32, length: usize) -> Option<Result<Memory>> {
        Some(self.copier.allocate(device, length).map_err(failed))
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        if let Place::Device(device) = memory.place() {
            self.copier.identity(device).map_err(failed)?;
            self.home.get_or_insert(device);
        }
        self.local.register(key, memory)
    }

    fn grant(&mut self, key: RegionKey, peer: Rank, _range: Range<u64>) -> Result<Vec<u8>> {
        let mut entry = self.local.grant(key, peer)?.to_vec();
        if let Some(Place::Device(device)) = self.local.memory(key).map(|memory| memory.place()) {
            entry.extend_from_slice(&self.copier.identity(device).map_err(failed)?);
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
        let index = key.0 as usize;
        let (serial, identity) = entry.split_at_checked(ENTRY_BYTES).ok_or_else(malformed)?;
        if identity.is_empty() {
            // A region that is known has kept its place; another one takes it.
            if self.local.is_mapped(peer, key, entry) {
                return Ok(());
            }
            self.forget_device(peer, key);
            return self.local.import(peer, key, length, entry, limit);
        }
        let identity: Identity = identity.try_into().map_err(|_| malformed())?;
        let serial = serial.try_into().map(u64::from_le_bytes).map_err(|_| malformed())?;
        let length = usize::try_from(length).map_err(|_| malformed())?;
        let known = self.devices(peer).and_then(|devices| devices.regions.get(index)?.as_ref());
        if known.is_some_and(|known| known.serial == serial) {
            return Ok(());
        }
        let descriptor = self.local.receive(peer, key, serial, limit)?;
        let home = self.home.or_else(|| self.copier.find(identity)).unwrap_or(0);
        let mut region = DeviceRegion { serial, length, home, descriptor, mapped: Vec::new() };
        // Now, so that what is wrong is said before anything is written.
        region.reached_by(&mut *self.copier, home).map_err(|why| {
            failed(format!("region {} of {peer} cannot be mapped on device {home}: {why}", key.0))
        })?;
        self.forget(peer, key);
        let devices = self.devices(peer);
        let devices =
            devices.ok_or_else(|| Error::Unknown { what: "rank", number: peer.0.into() })?;
        if devices.regions.len() <= index {
            devices.regions.resize_with(index + 1, || None);
        }
        devices.regions[index] = Some(region);
        Ok(())
    }

    fn deregister(&mut self, key: RegionKey) {
        self.pins.forget(key);
        self.local.deregister(key);
    }

    fn forget(&mut self, peer: Rank, key: RegionKey) {
        self.forget_device(peer, key);
        self.local.forget(peer, key);
    }

    fn post(&mut self, work: &Work<'_>, _sink: &mut Sink) -> std::result::Result<Posted, String> {
        let Work { token, peer, lane, .. } = *work;
        let needs = |page: &&Page| page.length > 0 && self.needs_engines(peer, page) == Some(true);
        let copies = work.pages.iter().filter(needs).count();
        let depth = self.depth;
        let devices = self.devices(peer).ok_or("it is not connected over copy")?;
        if copies > 0 && !devices.outbox.has_room(copies, depth) {
            return Ok(Posted::Full);
        }
        match self.enqueue(work) {
            (0, Some(why)) => Err(why),
            (0, None) => {
                self.local.raise(peer, lane).ok_or("it has no such lane")?;
                Ok(Posted::Done)
            }
            // It must not be reported as failed while some of it is still being read.
            (added, failure) => {
                let devices = self.devices(peer).ok_or("it is not connected over copy")?;
                devices.outbox.add(Part { token, lane, failure }, added);
                Ok(Posted::InFlight)
            }
        }
    }

    fn flush(&mut self, _sink: &mut Sink) {
        let CopyLink { copier, peers, ticker, .. } = self;
        for devices in peers.iter_mut().flatten().filter(|devices| !devices.outbox.is_empty()) {
            devices.outbox.seal(&mut **copier);
            ticker.set(true);
        }
    }

    fn poll(&mut self, _now: Time, sink: &mut Sink) {
        self.local.flush();
        if self.is_busy() {
            self.ticker.heard();
            self.look(sink);
            self.ticker.set(self.is_busy());
        }
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        let devices = self.peers.get_mut(peer.0 as usize).and_then(Option::take);
        if let Some(mut devices) = devices {
            let cut = |part: Part, sink: &mut Sink| {
                sink.failed(part.token, format!("{peer} was cut off"));
            };
            devices.outbox.seal(&mut *self.copier);
            let deadline = clock::now().after(self.patience);
            while !devices.outbox.is_empty() && clock::now() < deadline {
                devices.outbox.take_over(&mut *self.copier, |part| cut(part, sink));
                std::thread::sleep(POLL_INTERVAL);
            }
            if devices.outbox.is_empty() {
                devices.outbox.close(&mut *self.copier);
            } else {
                devices.outbox.give_up(|part| cut(part, sink));
                self.keep_forever(peer, devices);
            }
        }
        self.ticker.set(self.is_busy());
        self.local.disconnect(peer);
    }

    /// Ticks while copies are under way. What peers write raises lanes without this provider's help.
    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.ticker.descriptor()]
    }
}

impl Drop for CopyLink {
    /// A rank that leaves has written what it posted: lanes rise, as they would have over shm.
    fn drop(&mut self) {
        let mut sink = Sink::default();
        let deadline = clock::now().after(self.patience);
        while self.is_busy() && clock::now() < deadline {
            self.look(&mut sink);
            std::thread::sleep(POLL_INTERVAL);
        }
        for rank in (0..self.peers.len()).map(|number| Rank(number as u32)) {
            self.fence(rank, &mut sink);
        }
        self.pins = Pins::default();
    }
}
