//! Regions: memory registered with links, granted to peers, borrowed by requests.

use super::counters::RemoteCounter;
use super::region::{LocalRegion, Region, RemoteRegion, WeakRegion, is_inside};
use super::route::Route;
use super::state::Engine;
use super::unique_id::UniqueId;
use crate::descriptor::{CounterGrant, Grant, RegionGrant};
use crate::error::{Error, Result};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::types::{CounterId, Page, RegionKey, Time};
use std::ops::Range;
use std::sync::Arc;
use weft_control::Rank;

impl Engine {
    /// Registers memory with every link: a source at once, a destination after a grant. Device memory is
    /// registered with the providers that can use it, and can be written or granted only over routes of
    /// these providers. The same memory may be several regions.
    ///
    /// # Errors
    /// [`Error::Unusable`] if no provider can use it.
    pub fn register(&mut self, memory: impl Into<Arc<Memory>>) -> Result<Region> {
        let memory = memory.into();
        let slot = self.regions.iter().position(Option::is_none).unwrap_or(self.regions.len());
        let key = RegionKey(slot as u32);
        let refusals = self.register_with_links(key, &memory)?;
        let unusable = refusals.iter().fold(0, |mask, (link, _)| mask | 1 << link);
        let length = memory.len() as u64;
        self.registered += 1;
        let serial = self.registered;
        let local = LocalRegion { serial, _memory: memory.clone(), length, unusable, refusals };
        if slot == self.regions.len() {
            self.regions.push(Some(local));
        } else {
            self.regions[slot] = Some(local);
        }
        Ok(Region { key, serial, memory })
    }

    /// Registers memory with every link that can use it; returns the other links by index, and why they
    /// cannot.
    fn register_with_links(
        &mut self,
        key: RegionKey,
        memory: &Arc<Memory>,
    ) -> Result<Vec<(u16, String)>> {
        let (mut refusals, mut first) = (Vec::new(), None);
        for (index, link) in (0..).zip(&mut self.links) {
            match link.register(key, memory) {
                Ok(()) => {}
                Err(Error::Unusable { provider, key, detail }) if memory.host().is_none() => {
                    refusals.push((index, detail.clone()));
                    first.get_or_insert(Error::Unusable { provider, key, detail });
                }
                Err(error) => return Err(error),
            }
        }
        match first {
            Some(error) if refusals.len() == self.links.len() => Err(error),
            _ => Ok(refusals),
        }
    }

    /// True if a region is registered here and has not been released.
    pub(super) fn is_registered(&self, region: &WeakRegion) -> bool {
        match self.regions.get(region.key.0 as usize) {
            Some(Some(local)) => {
                local.serial == region.serial && local.unusable != LocalRegion::RELEASED
            }
            _ => false,
        }
    }

    /// Releases a region. Requests in flight keep it until they drain. Peers can still write to a granted
    /// region until then, so release it after the last write by a peer.
    pub fn release(&mut self, region: &Region) {
        if let Some(Some(local)) = self.regions.get_mut(region.key.0 as usize) {
            // The key may belong to another region by now.
            if local.serial == region.serial {
                let before = std::mem::replace(&mut local.unusable, LocalRegion::RELEASED);
                self.stamp = UniqueId::new();
                self.released += usize::from(before != LocalRegion::RELEASED);
                self.deregister_unread();
            }
        }
    }

    /// Removes a peer's region; no request in flight may name it.
    pub fn remove_remote(&mut self, peer: Rank, key: RegionKey) {
        let Some(route) = self.route(peer) else { return };
        self.peers[peer.index()].regions.remove(key);
        self.stamp = UniqueId::new();
        self.links[route.index].remove_remote(peer, key);
    }

    /// Deregisters the released regions that no request in flight reads.
    #[cold]
    #[inline(never)]
    pub(super) fn deregister_unread(&mut self) {
        for key in (0..self.regions.len() as u32).map(RegionKey) {
            let slot = &mut self.regions[key.0 as usize];
            let is_released =
                slot.as_ref().is_some_and(|local| local.unusable == LocalRegion::RELEASED);
            if is_released && !self.requests.read(key) {
                *slot = None;
                self.released -= 1;
                for link in &mut self.links {
                    link.deregister(key);
                }
            }
        }
    }

    /// Error for a page that cannot be written to a peer.
    pub(super) fn check_page(&mut self, peer: Rank, page: &Page) -> Result<()> {
        let key = page.source;
        let local = self.regions.get(key.0 as usize).and_then(Option::as_ref);
        let Some(local) = local.filter(|local| local.unusable != LocalRegion::RELEASED) else {
            return Err(Error::Unknown { what: "region", number: key.0.into() });
        };
        let state = &mut self.peers[peer.index()];
        if let Some(Route { index, provider, .. }) = state.route {
            local.check_usable(index as u16, key, || provider)?;
        }
        in_range("local", key, page.source_offset, page.length, local.length)?;
        let key = page.destination;
        let unknown = || Error::Unknown { what: "remote region", number: key.0.into() };
        let known = state.regions.length_of(key).ok_or_else(unknown)?;
        in_range("remote", key, page.destination_offset, page.length, known)
    }

    /// Makes a grant that lets `peer` write to these ranges in these regions and raise these counters.
    /// Pass the encoded grant to that peer's [`Engine::import`].
    pub fn grant(
        &mut self,
        peer: Rank,
        regions: &[(&Region, Range<u64>)],
        counters: &[CounterId],
    ) -> Result<Grant> {
        let route = self.route(peer);
        let route = route.ok_or_else(|| Error::Unknown { what: "rank", number: peer.0.into() })?;
        let mut grant = Grant::default();
        for (region, range) in regions {
            let length = region.memory.len() as u64;
            let wanted = range.end.saturating_sub(range.start);
            in_range("local", region.key, range.start, wanted, length)?;
            let local = self.regions.get(region.key.0 as usize).and_then(Option::as_ref);
            let local = local.filter(|local| local.unusable != LocalRegion::RELEASED);
            let link = route.index as u16;
            local
                .map_or(Ok(()), |local| local.check_usable(link, region.key, || route.provider))?;
            let entry = self.links[route.index].grant(region.key, peer, range.clone())?;
            grant.regions.push(RegionGrant { key: region.key, length, entry });
        }
        for &counter in counters {
            let end = self.end(counter, peer)?;
            if end.granted && end.remote.is_some() {
                return Err(Error::AlreadyLinked { counter });
            }
            end.granted = true;
            let (data, credit, window) = (end.data, end.credit, end.window);
            grant.counters.push(CounterGrant { data, credit, window });
        }
        Ok(grant)
    }

    /// Imports a grant from `peer`. The granted counters are linked with `counters` by position; the
    /// regions are returned in order.
    pub fn import(
        &mut self,
        peer: Rank,
        grant: &Grant,
        counters: &[CounterId],
        deadline: Time,
    ) -> Result<Vec<RemoteRegion>> {
        let mut limit = WaitLimit { deadline, give_up: &mut || Ok(()) };
        self.import_within(peer, grant, counters, &mut limit)
    }

    /// [`Engine::import`] with a check for other reasons to stop. After [`Error::Connect`] at the deadline
    /// a repeated call continues: imported regions stay, and counters are linked last.
    ///
    /// # Errors
    /// Same as [`Engine::import`]; also the error from [`WaitLimit::give_up`].
    pub fn import_within(
        &mut self,
        peer: Rank,
        grant: &Grant,
        counters: &[CounterId],
        limit: &mut WaitLimit<'_>,
    ) -> Result<Vec<RemoteRegion>> {
        let route = self.route(peer);
        let route = route.ok_or_else(|| Error::Unknown { what: "rank", number: peer.0.into() })?;
        if grant.counters.len() != counters.len() {
            let detail = format!(
                "{} counters were granted, {} are wanted: all ranks must create the same ones",
                grant.counters.len(),
                counters.len()
            );
            return Err(Error::Malformed { peer, what: "a grant", detail });
        }
        let mut remotes = Vec::with_capacity(grant.regions.len());
        if !grant.regions.is_empty() {
            self.stamp = UniqueId::new();
        }
        for RegionGrant { key, length, entry } in &grant.regions {
            self.links[route.index].import(peer, *key, *length, entry, limit)?;
            self.peers[peer.index()].regions.insert(*key, *length);
            remotes.push(RemoteRegion { peer, key: *key, length: *length });
        }
        for (&counter, grant) in counters.iter().zip(&grant.counters) {
            let CounterGrant { data, credit, window } = *grant;
            let end = self.end(counter, peer)?;
            if end.remote.is_some() {
                return Err(Error::AlreadyLinked { counter });
            }
            if end.window != window {
                let (number, ours) = (counter.number(), end.window);
                let detail = format!(
                    "its counter has a window of {window} rounds, counter {number} here has {ours}: \
                     create both alike"
                );
                return Err(Error::Malformed { peer, what: "a grant", detail });
            }
            end.remote = Some(RemoteCounter::new(data, credit));
        }
        Ok(remotes)
    }
}

fn in_range(
    side: &'static str,
    key: RegionKey,
    offset: u64,
    wanted: u64,
    length: u64,
) -> Result<()> {
    if is_inside(offset, wanted, length) {
        return Ok(());
    }
    Err(Error::OutOfRange { side, key, offset, wanted, length })
}
