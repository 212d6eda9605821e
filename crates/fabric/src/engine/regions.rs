//! Regions: memory known to every provider, granted to peers, borrowed by requests.

use super::counters::Remote;
use super::peer_group::Stamp;
use super::{Engine, Route};
use crate::descriptor::{CounterGrant, Grant, RegionGrant};
use crate::error::{Error, Result};
use crate::local::WaitLimit;
use crate::memory::Memory;
use crate::types::{CounterId, Page, ProviderKind, RegionKey, Time};
use std::ops::Range;
use std::sync::{Arc, Weak};
use weft_control::Rank;

/// Memory that this engine's links have registered. Clones are the same region.
///
/// It stays known until [`Engine::release`]; its memory lives until then and until no clone is left.
#[derive(Clone, Debug)]
pub struct Region {
    key: RegionKey,
    /// Distinguishes the regions that had this key one after the other.
    serial: u64,
    memory: Arc<Memory>,
}

impl Region {
    /// Its number in this engine.
    pub fn key(&self) -> RegionKey {
        self.key
    }

    /// Its bytes.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The same region, without keeping its memory.
    pub fn downgrade(&self) -> WeakRegion {
        WeakRegion { key: self.key, serial: self.serial, memory: Arc::downgrade(&self.memory) }
    }
}

/// A [`Region`] that does not keep its memory.
#[derive(Clone, Debug)]
pub struct WeakRegion {
    key: RegionKey,
    serial: u64,
    memory: Weak<Memory>,
}

impl WeakRegion {
    /// Its number in its engine.
    pub(super) fn key(&self) -> RegionKey {
        self.key
    }

    /// The region, if its memory is still there.
    pub fn upgrade(&self) -> Option<Region> {
        Some(Region { key: self.key, serial: self.serial, memory: self.memory.upgrade()? })
    }
}

/// A peer's region that this engine may write to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    /// The owner.
    pub peer: Rank,
    /// The owner's key.
    pub key: RegionKey,
    /// Its length in bytes.
    pub length: u64,
}

pub(super) struct Local {
    serial: u64,
    /// Kept until the region is forgotten.
    _memory: Arc<Memory>,
    length: u64,
    /// The links that cannot use it, a bit each in their order; [`Local::RELEASED`] if none may, since
    /// its owner released it. It is forgotten then when no request under way reads it.
    unusable: u32,
}

impl Local {
    const RELEASED: u32 = u32::MAX;

    /// Whether the link at this place may read this slice of it.
    #[inline(always)]
    pub fn may_read(&self, link: u16, offset: u64, length: u64) -> bool {
        self.unusable >> (link % 32) & 1 == 0 && is_inside(offset, length, self.length)
    }

    /// Checks that the link at this place can use it; `provider` is that link's.
    fn check_usable(
        &self,
        link: u16,
        key: RegionKey,
        provider: impl FnOnce() -> ProviderKind,
    ) -> Result<()> {
        if self.unusable & (1 << link) == 0 {
            return Ok(());
        }
        let provider = provider();
        let detail = format!(
            "it is memory of a device, which only the copy provider moves, and this peer is reached \
             over {provider}: copy it to host memory first, or use copy for this peer \
             (WEFT_PROVIDERS)"
        );
        Err(Error::Unusable { provider, key, detail })
    }
}

/// Lengths of a peer's regions.
#[derive(Default)]
pub(super) struct Lengths {
    /// In the order of keys.
    regions: Vec<(RegionKey, u64)>,
    /// Place of the one that was asked for last.
    recent: usize,
}

impl Lengths {
    /// Length of the peer's region of this key.
    #[inline(always)]
    pub fn length_of(&mut self, key: RegionKey) -> Option<u64> {
        match self.regions.get(self.recent) {
            Some((recent, length)) if *recent == key => Some(*length),
            _ => self.find(key),
        }
    }

    #[inline(never)]
    fn find(&mut self, key: RegionKey) -> Option<u64> {
        self.recent = self.regions.binary_search_by_key(&key, |(key, _)| *key).ok()?;
        Some(self.regions[self.recent].1)
    }

    fn learn(&mut self, key: RegionKey, length: u64) {
        match self.regions.binary_search_by_key(&key, |(key, _)| *key) {
            Ok(place) => self.regions[place].1 = length,
            Err(place) => self.regions.insert(place, (key, length)),
        }
    }

    fn forget(&mut self, key: RegionKey) {
        self.regions.retain(|(known, _)| *known != key);
    }
}

impl Engine {
    /// Makes memory known to every provider: a source at once, a destination once granted. Memory of a
    /// device is known to the providers that can use it, and can be written or granted over their
    /// routes alone. Memory may be known as several regions.
    ///
    /// # Errors
    /// [`Error::Unusable`] if no provider can use it.
    pub fn register(&mut self, memory: impl Into<Arc<Memory>>) -> Result<Region> {
        let memory = memory.into();
        let slot = self.regions.iter().position(Option::is_none).unwrap_or(self.regions.len());
        let key = RegionKey(slot as u32);
        let unusable = self.register_with_links(key, &memory)?;
        let length = memory.len() as u64;
        self.registered += 1;
        let serial = self.registered;
        let local = Local { serial, _memory: memory.clone(), length, unusable };
        if slot == self.regions.len() {
            self.regions.push(Some(local));
        } else {
            self.regions[slot] = Some(local);
        }
        Ok(Region { key, serial, memory })
    }

    /// Registers memory with every provider that can use it; returns those that cannot.
    fn register_with_links(&mut self, key: RegionKey, memory: &Arc<Memory>) -> Result<u32> {
        let (mut unusable, mut used) = (0, self.links.is_empty());
        let mut refusal = None;
        for (index, link) in self.links.iter_mut().enumerate() {
            match link.register(key, memory) {
                Ok(()) => used = true,
                Err(error @ Error::Unusable { .. }) if memory.host().is_none() => {
                    unusable |= 1 << index;
                    refusal.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        match refusal {
            Some(error) if !used => Err(error),
            _ => Ok(unusable),
        }
    }

    /// Whether a region was registered here and has not been released.
    pub(super) fn is_registered(&self, region: &WeakRegion) -> bool {
        match self.regions.get(region.key.0 as usize) {
            Some(Some(local)) => local.serial == region.serial && local.unusable != Local::RELEASED,
            _ => false,
        }
    }

    /// Forgets a region. Requests under way keep it until they drain. A region that was granted
    /// stays writable by its peers until then, so release it when they are done with it.
    pub fn release(&mut self, region: &Region) {
        if let Some(Some(local)) = self.regions.get_mut(region.key.0 as usize) {
            // Its number may have gone to another region since.
            if local.serial == region.serial {
                let before = std::mem::replace(&mut local.unusable, Local::RELEASED);
                self.stamp = Stamp::new();
                self.released += usize::from(before != Local::RELEASED);
                self.forget_unread();
            }
        }
    }

    /// Forgets a peer's region, to which nothing is written any more: no request that names it is
    /// under way.
    pub fn forget(&mut self, peer: Rank, key: RegionKey) {
        let Some(route) = self.route(peer) else { return };
        self.peers[peer.0 as usize].regions.forget(key);
        self.stamp = Stamp::new();
        self.links[route.index].forget(peer, key);
    }

    /// Forgets the released regions that no request under way reads.
    #[cold]
    #[inline(never)]
    pub(super) fn forget_unread(&mut self) {
        for key in (0..self.regions.len() as u32).map(RegionKey) {
            let slot = &mut self.regions[key.0 as usize];
            let is_released = slot.as_ref().is_some_and(|local| local.unusable == Local::RELEASED);
            if is_released && !self.requests.read(key) {
                *slot = None;
                self.released -= 1;
                for link in &mut self.links {
                    link.deregister(key);
                }
            }
        }
    }

    /// Why a page cannot be written to a peer.
    pub(super) fn check_page(&mut self, peer: Rank, page: &Page) -> Result<()> {
        let key = page.source;
        let local = self.regions.get(key.0 as usize).and_then(Option::as_ref);
        let Some(local) = local.filter(|local| local.unusable != Local::RELEASED) else {
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

    /// What `peer` needs in order to write to these ranges of these regions and to raise these
    /// counters. Encode it, send it to that peer, who gives it to [`Engine::import`].
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
            let local = local.filter(|local| local.unusable != Local::RELEASED);
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

    /// Takes what `peer` granted. Its counters are linked with `counters`, position by position;
    /// its regions are returned in the order in which it granted them.
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

    /// [`Engine::import`] with a check for every other reason to stop. After [`Error::Connect`] at the end
    /// of its time a repeat continues: regions that came stay imported, and counters are linked last.
    ///
    /// # Errors
    /// As [`Engine::import`]; that of [`WaitLimit::give_up`].
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
            self.stamp = Stamp::new();
        }
        for RegionGrant { key, length, entry } in &grant.regions {
            self.links[route.index].import(peer, *key, *length, entry, limit)?;
            self.peers[peer.0 as usize].regions.learn(*key, *length);
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
            end.remote = Some(Remote::new(data, credit));
        }
        Ok(remotes)
    }
}

/// Whether a slice is inside of a region of this length.
#[inline(always)]
pub(super) fn is_inside(offset: u64, wanted: u64, length: u64) -> bool {
    offset.checked_add(wanted).is_some_and(|end| end <= length)
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
