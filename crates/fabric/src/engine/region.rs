//! Local and remote regions, and slices inside them.

use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::types::{ProviderKind, RegionKey};
use std::sync::{Arc, Weak};
use weft_control::Rank;

/// Memory registered with this engine's links. Clones are the same region.
///
/// It stays registered until [`crate::Engine::release`]; the memory lives until then and until the last
/// clone is dropped.
#[derive(Clone, Debug)]
pub struct Region {
    pub(super) key: RegionKey,
    /// Serial number that distinguishes successive regions with this key.
    pub(super) serial: u64,
    pub(super) memory: Arc<Memory>,
}

impl Region {
    /// Region key.
    pub fn key(&self) -> RegionKey {
        self.key
    }

    /// Region memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// A weak reference to the region.
    pub fn downgrade(&self) -> WeakRegion {
        WeakRegion { key: self.key, serial: self.serial, memory: Arc::downgrade(&self.memory) }
    }
}

/// Weak reference to a [`Region`].
#[derive(Clone, Debug)]
pub struct WeakRegion {
    pub(super) key: RegionKey,
    pub(super) serial: u64,
    pub(super) memory: Weak<Memory>,
}

impl WeakRegion {
    /// Region key.
    pub(super) fn key(&self) -> RegionKey {
        self.key
    }

    /// The region, if the memory is alive.
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
    /// Length in bytes.
    pub length: u64,
}

pub(super) struct LocalRegion {
    pub(super) serial: u64,
    /// Kept until deregistration.
    pub(super) _memory: Arc<Memory>,
    pub(super) length: u64,
    /// Links that cannot use it, a bit each; [`LocalRegion::RELEASED`] after it was released. A released
    /// region is deregistered when no request in flight reads it.
    pub(super) unusable: u32,
    /// Reasons from those links, by index.
    pub(super) refusals: Vec<(u16, String)>,
}

impl LocalRegion {
    pub(super) const RELEASED: u32 = u32::MAX;

    /// True if the link with this index may read this slice.
    #[inline(always)]
    pub fn may_read(&self, link: u16, offset: u64, length: u64) -> bool {
        self.unusable >> (link % 32) & 1 == 0 && is_inside(offset, length, self.length)
    }

    /// Checks that the link with this index can use it; `provider` is that link's.
    pub(super) fn check_usable(
        &self,
        link: u16,
        key: RegionKey,
        provider: impl FnOnce() -> ProviderKind,
    ) -> Result<()> {
        if self.unusable & (1 << link) == 0 {
            return Ok(());
        }
        let refusal = self.refusals.iter().find(|(refused, _)| *refused == link);
        let why = refusal.map_or("memory of a device", |(_, why)| why);
        let detail = format!("{why}; or use copy for this peer (WEFT_PROVIDERS)");
        Err(Error::Unusable { provider: provider(), key, detail })
    }
}

/// Lengths of a peer's regions.
#[derive(Default)]
pub(super) struct RemoteLengths {
    /// In key order.
    pub(super) regions: Vec<(RegionKey, u64)>,
    /// Index that the last lookup found.
    pub(super) recent: usize,
}

impl RemoteLengths {
    /// Length of the peer's region with this key.
    #[inline(always)]
    pub fn length_of(&mut self, key: RegionKey) -> Option<u64> {
        match self.regions.get(self.recent) {
            Some((recent, length)) if *recent == key => Some(*length),
            _ => self.find(key),
        }
    }

    #[inline(never)]
    pub(super) fn find(&mut self, key: RegionKey) -> Option<u64> {
        self.recent = self.regions.binary_search_by_key(&key, |(key, _)| *key).ok()?;
        Some(self.regions[self.recent].1)
    }

    pub(super) fn insert(&mut self, key: RegionKey, length: u64) {
        match self.regions.binary_search_by_key(&key, |(key, _)| *key) {
            Ok(index) => self.regions[index].1 = length,
            Err(index) => self.regions.insert(index, (key, length)),
        }
    }

    pub(super) fn remove(&mut self, key: RegionKey) {
        self.regions.retain(|(known, _)| *known != key);
    }
}

/// True if a slice is inside a region with this length.
#[inline(always)]
pub(super) fn is_inside(offset: u64, wanted: u64, length: u64) -> bool {
    offset.checked_add(wanted).is_some_and(|end| end <= length)
}
