//! Ranks on one host, over shared memory: a write is stores into the peer's mapping, then one release
//! store to the lane.
//!
//! A [`Device`] over `local`, which connects the peers and maps their memory, and states how far they
//! trust each other. The data path takes no lock; the only system call wakes a sleeping peer. A post is
//! complete on return, so that no progress is needed; [`Link::poll`] only sends descriptors that a socket
//! did not accept at once. All resources are freed when the processes end.
//!
//! Where the kernel permits it, the link also reads peers' private memory ([`crate::MemoryReader`]); each
//! end probes it at connect.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::id_map::PeerMap;
use crate::link::{
    Introduction, Link, MappedPeer, Membership, PostStatus, RouteRule, Sink, WorkRequest,
};
use crate::local::{LocalPeers, WaitLimit};
use crate::memory::Memory;
use crate::peer_memory::{MemoryReader, ProbeWord, ProcessMemory};
use crate::types::{ProviderKind, RegionKey, Time};
use std::ops::Range;
use std::sync::Arc;
use weft_control::Rank;

/// [`ShmDevice`] configuration.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// Host name. Ranks with different names do not reach each other, so that tests can simulate several
    /// hosts.
    pub host_id: String,
}

/// This host's shared memory.
#[derive(Clone, Debug)]
pub struct ShmDevice {
    config: ShmConfig,
    /// Links probe whether they can read peers' memory.
    reads: bool,
}

impl ShmDevice {
    /// Shared memory on the configured host.
    pub fn new(config: ShmConfig) -> ShmDevice {
        ShmDevice { config, reads: true }
    }

    /// The same device; links on it read no peer memory, and let no peer read theirs, unless `reads`.
    pub fn with_reads(self, reads: bool) -> ShmDevice {
        ShmDevice { reads, ..self }
    }
}

impl Device for ShmDevice {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let local = LocalPeers::open(ProviderKind::Shm, &self.config.host_id, &[])?;
        let word = self.reads.then(ProbeWord::new).transpose();
        let word = word.map_err(|error| Error::system("cannot make a random word", error))?;
        let word = word.map(Arc::new);
        Ok(Box::new(ShmLink { local, group, word, readers: PeerMap::default() }))
    }
}

/// Mappings that belong to one group's peers.
#[derive(Debug)]
struct ShmLink {
    local: LocalPeers,
    group: Membership,
    /// Word that peers read as a probe; `None`: reads are off.
    word: Option<Arc<ProbeWord>>,
    /// Peers whose memory is readable.
    readers: PeerMap<Arc<ProcessMemory>>,
}

impl ShmLink {
    /// Probes whether the peer's memory can be read. `message` comes from the peer's introduction, empty
    /// if reads are off there.
    fn probe(&mut self, peer: Rank, message: &[u8]) {
        if self.word.is_none() || message.is_empty() {
            let end = if self.word.is_none() { "here" } else { "at the peer" };
            log::debug!("memory of {peer}: not read in place; turned off {end}");
            return;
        }
        let hidden = || "its PID namespace is not inside this one".to_owned();
        let pid = self.local.process(peer).ok_or_else(hidden);
        match pid.and_then(|pid| ProcessMemory::probe(pid, message)) {
            Ok(memory) => {
                log::debug!("memory of {peer}: read in place (process_vm_readv)");
                self.readers.insert(peer, Arc::new(memory));
            }
            Err(why) => log::info!("memory of {peer}: not read in place; {why}"),
        }
    }
}

impl Link for ShmLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn address(&self) -> Vec<u8> {
        self.local.address()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        let rule = RouteRule { mapped: true, ..RouteRule::STORES };
        self.local.reaches(theirs).then_some(rule)
    }

    fn introduce(&mut self, _peer: Rank, _address: &[u8]) -> Result<Vec<u8>> {
        Ok(self.word.as_ref().map(|word| word.message()).unwrap_or_default())
    }

    fn connect(&mut self, peers: &[Introduction<'_>], limit: &mut WaitLimit<'_>) -> Result<()> {
        self.local.connect(&self.group, peers, limit)?;
        for peer in peers {
            self.probe(peer.peer, peer.message);
        }
        Ok(())
    }

    fn probe_word(&self) -> Option<Arc<ProbeWord>> {
        self.word.clone()
    }

    fn memory_reader(&self, peer: Rank) -> Option<Arc<dyn MemoryReader>> {
        Some(self.readers.get(peer)?.clone())
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        if memory.host().is_none() {
            let detail = "memory that the CPU cannot read; copy it to host memory first".into();
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

    fn remove_remote(&mut self, peer: Rank, key: RegionKey) {
        self.local.remove_remote(peer, key);
    }

    fn mapped_peer(&self, peer: Rank, key: RegionKey) -> Option<MappedPeer> {
        self.local.mapped_peer(peer, key)
    }

    fn post(
        &mut self,
        work: &WorkRequest<'_>,
        _sink: &mut Sink,
    ) -> std::result::Result<PostStatus, String> {
        self.local.write(work)?;
        Ok(PostStatus::Done)
    }

    fn post_in_batch(
        &mut self,
        work: &WorkRequest<'_>,
        _sink: &mut Sink,
    ) -> std::result::Result<PostStatus, String> {
        self.local.write_in_batch(work)?;
        Ok(PostStatus::Done)
    }

    fn flush(&mut self, _sink: &mut Sink) {
        self.local.mark_raised();
    }

    fn peers_raise(&self) -> bool {
        true
    }

    fn share_wake(&mut self) -> bool {
        self.local.share_wake(&self.group.lanes)
    }

    fn expect_write(&mut self, peer: Rank) {
        self.local.expect_write(peer);
    }

    fn poll(&mut self, _now: Time, _sink: &mut Sink) {
        self.local.flush();
    }

    /// Drops the peer's mappings. No part is ever in flight.
    fn fence(&mut self, peer: Rank, _sink: &mut Sink) {
        self.readers.remove(peer);
        self.local.disconnect(peer);
    }
}
