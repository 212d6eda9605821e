//! Ranks of one host: a write is stores into the peer's mapping and one release store of its lane.
//!
//! A [`Device`] over [`crate::local`], which meets the peers and maps their memory; its page states who
//! is trusted with that. No lock, and a system call only to wake a peer that sleeps. A post is done when
//! it returns, so no progress is ever needed; [`Link::poll`] only sends descriptors that a socket did not
//! take at once. Nothing is left behind when the processes end.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Membership, Posted, RouteRule, Sink, Work};
use crate::local::{LocalPeers, WaitLimit};
use crate::memory::Memory;
use crate::types::{ProviderKind, RegionKey, Time};
use std::ops::Range;
use std::sync::Arc;
use weft_control::Rank;

/// How to open the device.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// Names this host. Ranks with different names do not reach each other here, so tests can pretend
    /// to be several hosts.
    pub host_id: String,
}

/// Shared memory of this host.
#[derive(Clone, Debug)]
pub struct ShmDevice {
    config: ShmConfig,
}

impl ShmDevice {
    /// Shared memory of the host of this name.
    pub fn new(config: ShmConfig) -> ShmDevice {
        ShmDevice { config }
    }
}

impl Device for ShmDevice {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let local = LocalPeers::open(ProviderKind::Shm, &self.config.host_id, &[])?;
        Ok(Box::new(ShmLink { local, group }))
    }
}

/// One group's mappings of its peers' memory.
#[derive(Debug)]
struct ShmLink {
    local: LocalPeers,
    group: Membership,
}

impl Link for ShmLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn address(&self) -> Vec<u8> {
        self.local.address()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        self.local.reaches(theirs).then_some(RouteRule::STORES)
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        self.local.connect(&self.group, peers, limit)
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        if memory.host().is_none() {
            let detail = "the CPU cannot read it; copy it to host memory first".into();
            return Err(Error::Unusable { provider: ProviderKind::Shm, key, detail });
        }
        self.local.register(key, memory)
    }

    fn grant(&mut self, key: RegionKey, peer: Rank, _range: Range<u64>) -> Result<Vec<u8>> {
        Ok(self.local.grant(key, peer)?.to_vec())
    }

    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        self.local.import(peer, key, length, entry, limit)
    }

    fn deregister(&mut self, key: RegionKey) {
        self.local.deregister(key);
    }

    fn forget(&mut self, peer: Rank, key: RegionKey) {
        self.local.forget(peer, key);
    }

    fn post(&mut self, work: &Work<'_>, _sink: &mut Sink) -> std::result::Result<Posted, String> {
        self.local.write(work)?;
        Ok(Posted::Done)
    }

    fn flush(&mut self, _sink: &mut Sink) {}

    fn poll(&mut self, _now: Time, _sink: &mut Sink) {
        self.local.flush();
    }

    /// Drops everything that is mapped of the peer. Nothing is ever in flight.
    fn fence(&mut self, peer: Rank, _sink: &mut Sink) {
        self.local.disconnect(peer);
    }
}
