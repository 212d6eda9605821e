//! One rank's end of a world, as the engine sees it.

use super::World;
use super::part::Taken;
use crate::bytes::Reader;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::provider::{Capabilities, Group, Posted, Provider, Sink, Work};
use crate::types::{ProviderKind, RegionKey, Time};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use weft_control::Rank;

pub(super) struct End {
    world: World,
    rank: Rank,
}

impl End {
    pub fn new(world: World, rank: Rank) -> End {
        End { world, rank }
    }

    /// Ranks of one world reach each other; its address in memory names it.
    fn world_name(&self) -> u64 {
        Arc::as_ptr(&self.world.state).addr() as u64
    }
}

impl Provider for End {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Sim
    }

    fn capabilities(&self) -> Capabilities {
        let parts = self.world.state().part_rule();
        Capabilities { parts, registered_destination: true, inline: false }
    }

    fn address(&self) -> Vec<u8> {
        self.world_name().to_le_bytes().to_vec()
    }

    fn reaches(&self, address: &[u8]) -> bool {
        address == self.world_name().to_le_bytes()
    }

    fn connect(&mut self, group: &Group<'_>) -> Result<()> {
        self.world.state().join(self.rank, group.lanes);
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
        _deadline: Time,
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

    fn descriptor(&self) -> Option<RawFd> {
        None
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.world.state().leave(self.rank);
    }
}
