//! One rank's end of a world, as the engine sees it.

use super::World;
use super::part::Taken;
use crate::bytes::Reader;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::link::{Introduction, Link, Membership, Posted, RouteRule, Sink, Work};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::types::{ProviderKind, RegionKey, Time};
use std::ops::Range;
use std::sync::Arc;
use weft_control::Rank;

/// One rank's device: it has one link, as a rank of a world is in one group.
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
        Ok(Box::new(SimLink { world: self.world.clone(), rank: self.rank, group }))
    }
}

struct SimLink {
    world: World,
    rank: Rank,
    group: Membership,
}

impl SimLink {
    /// Ranks of one world reach each other; its address in memory names it.
    fn world_name(&self) -> u64 {
        Arc::as_ptr(&self.world.state).addr() as u64
    }
}

impl Link for SimLink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Sim
    }

    fn address(&self) -> Vec<u8> {
        self.world_name().to_le_bytes().to_vec()
    }

    fn route(&self, theirs: &[u8]) -> Option<RouteRule> {
        let parts = self.world.state().part_rule();
        let rule = RouteRule { parts, ordered: false, inline: false };
        (theirs == self.world_name().to_le_bytes()).then_some(rule)
    }

    fn connect(&mut self, _: &[Introduction<'_>], _: &mut WaitLimit<'_>) -> Result<()> {
        self.world.state().join(self.rank, &self.group.lanes);
        Ok(())
    }

    fn register(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<()> {
        if memory.host().is_none() {
            let detail = "it lies on a device; the simulator copies with the CPU".to_owned();
            return Err(Error::Unusable { provider: ProviderKind::Sim, key, detail });
        }
        self.world.state().register(self.rank, key, memory);
        Ok(())
    }

    fn grant(&mut self, key: RegionKey, peer: Rank, range: Range<u64>) -> Result<Vec<u8>> {
        self.world.state().grant(self.rank, key, peer, range.clone());
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
        self.world.state().deregister(self.rank, key);
    }

    fn post(&mut self, work: &Work<'_>, _sink: &mut Sink) -> std::result::Result<Posted, String> {
        match self.world.state().post(self.rank, work)? {
            Taken::Yes => Ok(Posted::InFlight),
            Taken::QueueFull => Ok(Posted::Full),
        }
    }

    fn flush(&mut self, _sink: &mut Sink) {}

    fn poll(&mut self, _now: Time, sink: &mut Sink) {
        self.world.state().collect(self.rank, sink);
    }

    fn fence(&mut self, peer: Rank, sink: &mut Sink) {
        self.world.state().fence(self.rank, peer, sink);
    }
}

impl Drop for SimLink {
    fn drop(&mut self) {
        self.world.state().leave(self.rank);
    }
}
