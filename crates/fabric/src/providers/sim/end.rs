//! One rank's end of a world, as the engine sees it.

use super::World;
use super::part::Taken;
use crate::bytes::Reader;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Membership, Posted, RouteRule, Sink, Work};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::types::{Lane, ProviderKind, RegionKey, Time};
use std::ops::Range;
use std::sync::Arc;
use weft_control::Rank;

/// One rank's device. Each group that the rank is in opens a link on it, which is an end of its own.
pub(super) struct End {
    world: World,
    rank: Rank,
}

impl End {
    pub fn new(world: World, rank: Rank) -> End {
        End { world, rank }
    }
}

impl Device for End {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Sim
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let end = self.world.state().open_end(self.rank);
        Ok(Box::new(SimLink { world: self.world.clone(), end, ends: Vec::new(), group }))
    }
}

struct SimLink {
    world: World,
    /// This end's number in the world.
    end: Rank,
    /// The ends of the group, by rank.
    ends: Vec<Rank>,
    group: Membership,
}

impl SimLink {
    /// Ranks of one world reach each other; its address in memory names it.
    fn world_name(&self) -> [u8; 8] {
        (Arc::as_ptr(&self.world.state).addr() as u64).to_le_bytes()
    }

    /// The end of a rank of the group.
    fn end_of(&self, peer: Rank) -> Option<Rank> {
        self.ends.get(peer.index()).copied()
    }

    /// The rank of an end of the group.
    fn rank_of(&self, end: Rank) -> Option<Rank> {
        self.ends.iter().position(|other| *other == end).map(|rank| Rank(rank as u32))
    }
}

impl Link for SimLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Sim
    }

    fn address(&self) -> Vec<u8> {
        [&self.world_name()[..], &self.end.0.to_le_bytes()].concat()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        let parts = self.world.state().part_rule();
        let rule = RouteRule { parts, ordered: false, ..RouteRule::LATER };
        theirs.starts_with(&self.world_name()).then_some(rule)
    }

    fn connect(&mut self, peers: &[Introduction<'_>], _: &mut WaitLimit<'_>) -> Result<()> {
        self.ends = vec![self.end; self.group.size as usize];
        for Introduction { peer, address, .. } in peers {
            let mut reader = Reader::new(address);
            let end = reader.u64().and_then(|_| reader.u32()).filter(|_| reader.is_at_end());
            let malformed = || {
                let detail = format!("{} bytes", address.len());
                Error::Malformed { peer: *peer, what: "an address of the simulator", detail }
            };
            self.ends[peer.index()] = Rank(end.ok_or_else(malformed)?);
        }
        self.world.state().join(self.end, &self.ends, &self.group.lanes);
        Ok(())
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        if memory.host().is_none() {
            let detail = "it lies on a device; the simulator copies with the CPU".to_owned();
            return Err(Error::Unusable { provider: ProviderKind::Sim, key, detail });
        }
        self.world.state().register(self.end, key, memory);
        Ok(())
    }

    fn grant(&mut self, key: RegionKey, peer: Rank, range: Range<u64>) -> Result<Vec<u8>> {
        let unknown = || Error::Unknown { what: "rank", number: peer.0.into() };
        let end = self.end_of(peer).ok_or_else(unknown)?;
        self.world.state().grant(self.end, key, end, range.clone());
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
        let detail = format!("region {} of {length} bytes is not described by it", key.0);
        Err(Error::Malformed { peer, what: "a grant", detail })
    }

    fn deregister(&mut self, key: RegionKey) {
        self.world.state().deregister(self.end, key);
    }

    fn post(&mut self, work: &Work<'_>, _sink: &mut Sink) -> std::result::Result<Posted, String> {
        let peer = self.end_of(work.peer).ok_or("it is not connected in the simulator")?;
        match self.world.state().post(self.end, &Work { peer, ..*work })? {
            Taken::Yes => Ok(Posted::InFlight),
            Taken::QueueFull => Ok(Posted::Full),
        }
    }

    fn released(&mut self, peer: Rank, lane: Lane) {
        if let Some(end) = self.end_of(peer) {
            self.world.state().credit(self.end, end, lane);
        }
    }

    fn flush(&mut self, _sink: &mut Sink) {}

    fn poll(&mut self, _now: Time, sink: &mut Sink) {
        let known = sink.lost.len();
        self.world.state().collect(self.end, sink);
        // The world reports ends, the engine knows ranks.
        for (peer, _) in &mut sink.lost[known..] {
            *peer = self.rank_of(*peer).unwrap_or(*peer);
        }
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        if let Some(end) = self.end_of(peer) {
            self.world.state().fence(self.end, end, sink);
        }
    }
}

impl Drop for SimLink {
    fn drop(&mut self) {
        self.world.state().leave(self.end);
    }
}
