//! Ranks of one host: a write is stores into the peer's mapping and one release store of its lane.
//!
//! A [`Provider`] over [`crate::local`], which meets the peers, maps their memory and says whom that
//! trusts. No lock, and a system call only to wake a peer that sleeps. A post is done when it returns,
//! so no progress is ever needed; [`Provider::poll`] only sends descriptors that a socket did not take
//! at once. Nothing is left behind when the processes end.

use crate::error::{Error, Result};
use crate::local::{LocalPeers, WaitLimit};
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::provider::{Capabilities, Group, Posted, Provider, Sink, Work};
use crate::types::{ProviderKind, RegionKey, Time};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use weft_control::Rank;

/// How to open the provider.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// Names this host. Ranks with different names do not reach each other here, so tests can pretend
    /// to be several hosts.
    pub host_id: String,
}

/// The provider. One for each engine.
#[derive(Debug)]
pub struct ShmProvider {
    local: LocalPeers,
}

impl ShmProvider {
    /// Opens the provider and starts to listen for peers.
    ///
    /// # Errors
    /// [`Error::System`] if the system gives no socket.
    pub fn new(config: ShmConfig) -> Result<ShmProvider> {
        Ok(ShmProvider { local: LocalPeers::open(ProviderKind::Shm, &config.host_id, &[])? })
    }
}

impl Provider for ShmProvider {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { parts: PartRule::WHOLE, registered_destination: false, inline: true }
    }

    fn address(&self) -> Vec<u8> {
        self.local.address()
    }

    fn reaches(&self, address: &[u8]) -> bool {
        self.local.reaches(address)
    }

    fn connect(&mut self, group: &Group<'_>) -> Result<()> {
        let mut limit = WaitLimit { deadline: group.deadline, give_up: &mut || Ok(()) };
        self.local.connect(group, &mut limit)
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
        deadline: Time,
    ) -> Result<()> {
        let mut limit = WaitLimit { deadline, give_up: &mut || Ok(()) };
        self.local.import(peer, key, length, entry, &mut limit)
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

    fn descriptor(&self) -> Option<RawFd> {
        None
    }
}
