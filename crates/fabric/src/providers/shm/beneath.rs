//! What the `copy` provider takes from this one: peers and their lanes, descriptors, host memory.

use super::address::Address;
use super::connect::{self, refused};
use super::link::sleep;
use super::{Local, MAX_REGIONS, ShmProvider};
use crate::clock;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::types::{Lane, Page, ProviderKind, RegionKey, Time};
use rustix::fd::OwnedFd;
use std::sync::Arc;
use weft_control::Rank;

impl ShmProvider {
    /// The part that a provider of another kind has in common with this one. It reaches those whose
    /// `flavour` is the same.
    pub(in crate::providers) fn beneath(
        kind: ProviderKind,
        host_id: &str,
        flavour: &[u8],
    ) -> Result<ShmProvider> {
        let mut address = Address::new(host_id)?;
        address.domain.extend_from_slice(flavour);
        let listener = Some(connect::listen(&address.name)?);
        let (peers, regions) = (Vec::new(), Vec::new());
        Ok(ShmProvider { kind, address, listener, peers, regions, next_serial: 0, unsent: false })
    }

    /// Knows `memory` as `key`, wherever it lies.
    pub(in crate::providers) fn keep(
        &mut self,
        key: RegionKey,
        memory: &Arc<Memory>,
    ) -> Result<()> {
        let index = key.0 as usize;
        if index >= MAX_REGIONS {
            let (wanted, limit) = (index as u64 + 1, MAX_REGIONS as u64);
            return Err(Error::Limit { what: "regions over shm", wanted, limit });
        }
        if self.regions.len() <= index {
            self.regions.resize_with(index + 1, || None);
        }
        let (memory, serial, pushed) = (memory.clone(), self.next_serial, Vec::new());
        self.next_serial += 1;
        self.regions[index] = Some(Local { memory, serial, pushed });
        Ok(())
    }

    /// The memory of a region of ours.
    pub(in crate::providers) fn memory(&self, key: RegionKey) -> Option<&Arc<Memory>> {
        Some(&self.regions.get(key.0 as usize)?.as_ref()?.memory)
    }

    /// Every region of ours.
    pub(in crate::providers) fn memories(&self) -> impl Iterator<Item = &Arc<Memory>> {
        self.regions.iter().flatten().map(|local| &local.memory)
    }

    /// A peer's region of host memory, as it is mapped here.
    pub(in crate::providers) fn mapped(&self, peer: Rank, key: RegionKey) -> Option<&Arc<Memory>> {
        let peer = self.peers.get(peer.0 as usize)?.as_ref()?;
        Some(&peer.regions.get(key.0 as usize)?.as_ref()?.memory)
    }

    /// Whether a peer's region of host memory is mapped here with this entry.
    pub(in crate::providers) fn knows(&self, peer: Rank, key: RegionKey, entry: &[u8]) -> bool {
        let peer = self.peers.get(peer.0 as usize).and_then(Option::as_ref);
        let known = peer.and_then(|peer| peer.regions.get(key.0 as usize)?.as_ref());
        known.is_some_and(|known| known.serial.to_le_bytes() == entry)
    }

    /// Every region of host memory of a peer, as it is mapped here.
    pub(in crate::providers) fn mapped_of(&self, peer: Rank) -> impl Iterator<Item = &Arc<Memory>> {
        let peer = self.peers.get(peer.0 as usize).and_then(Option::as_ref);
        let regions = peer.into_iter().flat_map(|peer| &peer.regions);
        regions.flatten().map(|mapped| &mapped.memory)
    }

    /// Copies a page with the CPU; `None` if it is not inside both regions, or one of them is not of
    /// host memory.
    pub(in crate::providers) fn store(&self, to: Rank, page: &Page) -> Option<()> {
        let from = self.regions.get(page.source.0 as usize)?.as_ref()?;
        self.peers.get(to.0 as usize)?.as_ref()?.copy(page, &from.memory)
    }

    /// Raises a lane of a peer by one: what this process wrote to it before is visible to whoever
    /// sees the lane's new value. `None` if it has no such lane.
    pub(in crate::providers) fn raise(&mut self, peer: Rank, lane: Lane) -> Option<()> {
        self.peers.get_mut(peer.0 as usize)?.as_mut()?.raise(lane, None)
    }

    /// Takes the descriptor of a region that was granted, which its owner sends over the socket.
    pub(in crate::providers) fn receive(
        &mut self,
        peer: Rank,
        key: RegionKey,
        serial: u64,
        deadline: Time,
    ) -> Result<OwnedFd> {
        let kind = self.kind;
        loop {
            self.flush_links();
            let from = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut);
            let from =
                from.ok_or_else(|| Error::Unknown { what: "rank", number: peer.0.into() })?;
            let heard = from.hear();
            if let Some(descriptor) = from.arrived.remove(&(key, serial)) {
                return Ok(descriptor);
            }
            heard.map_err(|e| refused(kind, peer, e.to_string()))?;
            let now = clock::now();
            if now >= deadline {
                let detail = format!("region {} did not come before the deadline", key.0);
                return Err(refused(kind, peer, detail));
            }
            let timeout = deadline.since(now).min(connect::NAP);
            let links = (0..).map(Rank).zip(&self.peers);
            let mut polled: Vec<_> = links
                .filter_map(|(rank, other)| Some(other.as_ref()?.link.interest(rank == peer)))
                .collect();
            sleep(&mut polled, timeout);
        }
    }
}
