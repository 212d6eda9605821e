//! A rank's device and link over a simulated world.

use super::world::World;
use crate::bytes::Reader;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Membership, PostStatus, RouteRule, Sink, WorkRequest};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::peer_memory::{MemoryReader, OwnMemory};
use crate::types::{Lane, ProviderKind, RegionKey, Time};
use std::ops::Range;
use std::sync::Arc;
use weft_control::Rank;

/// One rank's device. Each group that the rank joins opens a separate link.
pub(super) struct SimDevice {
    world: World,
    rank: Rank,
}

impl SimDevice {
    pub fn new(world: World, rank: Rank) -> SimDevice {
        SimDevice { world, rank }
    }
}

impl World {
    /// One rank's device.
    ///
    /// # Panics
    /// If the world has no such rank.
    pub fn device(&self, rank: Rank) -> Arc<dyn Device> {
        assert!(rank.0 < self.ranks(), "{rank} is not in a world of {}", self.ranks());
        Arc::new(SimDevice::new(self.clone(), rank))
    }
}

impl Device for SimDevice {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Sim
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let link = self.world.state().open_link(self.rank);
        Ok(Box::new(SimLink { world: self.world.clone(), link, links: Vec::new(), group }))
    }
}

struct SimLink {
    world: World,
    /// Link number in the world.
    link: Rank,
    /// Links in the group, by rank.
    links: Vec<Rank>,
    group: Membership,
}

impl SimLink {
    /// World name: an address in memory. Ranks in one world reach each other.
    fn world_name(&self) -> [u8; 8] {
        (Arc::as_ptr(&self.world.state).addr() as u64).to_le_bytes()
    }

    /// Link for a group rank.
    fn link_of(&self, peer: Rank) -> Option<Rank> {
        self.links.get(peer.index()).copied()
    }

    /// Group rank for a link.
    fn rank_of(&self, link: Rank) -> Option<Rank> {
        self.links.iter().position(|other| *other == link).map(|rank| Rank(rank as u32))
    }
}

impl Link for SimLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Sim
    }

    fn address(&self) -> Vec<u8> {
        [&self.world_name()[..], &self.link.0.to_le_bytes()].concat()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        let parts = self.world.state().part_rule();
        let rule = RouteRule { parts, ordered: false, ..RouteRule::DEFERRED };
        theirs.starts_with(&self.world_name()).then_some(rule)
    }

    fn connect(&mut self, peers: &[Introduction<'_>], _: &mut WaitLimit<'_>) -> Result<()> {
        self.links = vec![self.link; self.group.size as usize];
        for Introduction { peer, address, .. } in peers {
            let mut reader = Reader::new(address);
            let link = reader.u64().and_then(|_| reader.u32()).filter(|_| reader.is_at_end());
            let malformed = || {
                let detail = format!("{} bytes", address.len());
                Error::Malformed { peer: *peer, what: "a sim address", detail }
            };
            self.links[peer.index()] = Rank(link.ok_or_else(malformed)?);
        }
        self.world.state().join(self.link, &self.links, &self.group.lanes);
        Ok(())
    }

    fn memory_reader(&self, peer: Rank) -> Option<Arc<dyn MemoryReader>> {
        let (world, link) = (self.world.clone(), self.link_of(peer)?);
        Some(Arc::new(OwnMemory::while_alive(move || world.is_alive(link))))
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        if memory.host().is_none() {
            let detail =
                "memory of a device: the simulator copies with the CPU; use host memory".to_owned();
            return Err(Error::Unusable { provider: ProviderKind::Sim, key, detail });
        }
        self.world.state().register(self.link, key, memory);
        Ok(())
    }

    fn grant(&mut self, key: RegionKey, peer: Rank, range: Range<u64>) -> Result<Vec<u8>> {
        let unknown = || Error::Unknown { what: "rank", number: peer.0.into() };
        let link = self.link_of(peer).ok_or_else(unknown)?;
        self.world.state().grant(self.link, key, link, range.clone());
        Ok([range.start.to_le_bytes(), range.end.to_le_bytes()].concat())
    }

    fn import(
        &mut self,
        peer: Rank,
        key: RegionKey,
        length: u64,
        entry: &[u8],
        _limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        let mut reader = Reader::new(entry);
        let range = (|| Some(reader.u64()?..reader.u64()?))();
        if range.is_some_and(|range| range.end <= length && reader.is_at_end()) {
            return Ok(());
        }
        let detail = format!("region {}: expected a range within {length} bytes", key.0);
        Err(Error::Malformed { peer, what: "a grant", detail })
    }

    fn deregister(&mut self, key: RegionKey) {
        self.world.state().deregister(self.link, key);
    }

    /// The world raises lanes for the peers.
    fn peers_raise(&self) -> bool {
        true
    }

    fn post(
        &mut self,
        work: &WorkRequest<'_>,
        _sink: &mut Sink,
    ) -> std::result::Result<PostStatus, String> {
        let peer = self.link_of(work.peer).ok_or("it is not connected over sim")?;
        self.world.state().post(self.link, &WorkRequest { peer, ..*work })
    }

    fn released(&mut self, peer: Rank, lane: Lane) {
        if let Some(link) = self.link_of(peer) {
            self.world.state().credit(self.link, link, lane);
        }
    }

    fn flush(&mut self, _sink: &mut Sink) {}

    fn poll(&mut self, _now: Time, sink: &mut Sink) {
        let known = sink.lost.len();
        self.world.state().collect(self.link, sink);
        // The world reports links, the engine expects ranks.
        for (peer, _) in &mut sink.lost[known..] {
            *peer = self.rank_of(*peer).unwrap_or(*peer);
        }
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        if let Some(link) = self.link_of(peer) {
            self.world.state().fence(self.link, link, sink);
        }
    }
}

impl Drop for SimLink {
    fn drop(&mut self) {
        self.world.state().leave(self.link);
    }
}
