//! Pinned host memory by region key.

use super::engine::CopyEngine;
use crate::memory::Memory;
use crate::types::RegionKey;

/// Pins and failed attempts, made when a region is first copied.
#[derive(Default)]
pub struct PinnedRegions(Vec<Option<PinGuard>>);

/// `None` for memory that cannot be pinned: copies from it are slower.
type PinGuard = Option<Box<dyn Send>>;

impl PinnedRegions {
    /// Pins a region, once; true if it is pinned.
    ///
    /// # Safety
    /// [`PinnedRegions::forget`] is called, or this dropped, before the memory goes.
    pub unsafe fn pin(
        &mut self,
        engine: &mut dyn CopyEngine,
        device: u32,
        key: RegionKey,
        memory: &Memory,
    ) -> bool {
        let index = key.0 as usize;
        if self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        // SAFETY: by the caller's contract.
        self.0[index].get_or_insert_with(|| unsafe { engine.pin(device, memory) }).is_some()
    }

    /// Drops a region's pin.
    pub fn remove_remote(&mut self, key: RegionKey) {
        if let Some(slot) = self.0.get_mut(key.0 as usize) {
            *slot = None;
        }
    }
}
