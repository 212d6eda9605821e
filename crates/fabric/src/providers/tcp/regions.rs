//! Registered regions: the engine's, and a wrapper's own under high keys.

use crate::id_map::RegionMap;
use crate::memory::Memory;
use crate::types::RegionKey;
use std::sync::Arc;

/// Memory by region key. Keys count from zero, and from [`RegionKey::HIGH`] on.
#[derive(Default)]
pub(super) struct TcpRegions {
    regions: RegionMap<Arc<Memory>>,
    high: RegionMap<Arc<Memory>>,
}

impl TcpRegions {
    #[inline(always)]
    pub fn get(&self, key: RegionKey) -> Option<&Arc<Memory>> {
        let found = self.regions.get(key);
        if found.is_some() { found } else { self.high(key) }
    }

    #[cold]
    #[inline(never)]
    fn high(&self, key: RegionKey) -> Option<&Arc<Memory>> {
        self.high.get(RegionKey(key.0.checked_sub(RegionKey::HIGH)?))
    }

    pub fn insert(&mut self, key: RegionKey, memory: Arc<Memory>) {
        match key.0.checked_sub(RegionKey::HIGH) {
            None => self.regions.insert(key, memory),
            Some(low) => self.high.insert(RegionKey(low), memory),
        }
    }

    pub fn remove(&mut self, key: RegionKey) {
        match key.0.checked_sub(RegionKey::HIGH) {
            None => self.regions.remove(key),
            Some(low) => self.high.remove(RegionKey(low)),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_high_key_is_another_region_than_the_low_one_with_its_number() {
        let mut regions = TcpRegions::default();
        let keys = [RegionKey(3), RegionKey(RegionKey::HIGH + 3)];
        for (key, length) in keys.into_iter().zip([5, 7]) {
            regions.insert(key, Arc::new(Memory::shared(length).unwrap()));
        }
        let lengths = |regions: &TcpRegions| keys.map(|key| regions.get(key).map(|it| it.len()));
        assert_eq!(lengths(&regions), [Some(5), Some(7)]);
        assert!(regions.get(RegionKey(u32::MAX)).is_none());
        regions.remove(keys[1]);
        assert_eq!(lengths(&regions), [Some(5), None]);
    }
}
