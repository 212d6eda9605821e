//! Host memory that copy engines reach without a detour, by the key of its region.

use super::copier::Copier;
use crate::memory::Memory;
use crate::types::RegionKey;

/// Regions that were pinned, or for which that failed, at their first copy.
#[derive(Default)]
pub(super) struct Pins(Vec<Option<Pin>>);

/// `None` if it cannot be pinned: it is copied all the same, only slower.
type Pin = Option<Box<dyn Send>>;

impl Pins {
    /// Pins a region, once.
    ///
    /// # Safety
    /// [`Pins::forget`] is called, or this dropped, before the memory goes.
    pub unsafe fn pin(
        &mut self,
        copier: &mut dyn Copier,
        device: u32,
        key: RegionKey,
        memory: &Memory,
    ) {
        let index = key.0 as usize;
        if self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        // SAFETY: as the caller promises.
        self.0[index].get_or_insert_with(|| unsafe { copier.pin(device, memory) });
    }

    /// Undoes it.
    pub fn forget(&mut self, key: RegionKey) {
        if let Some(slot) = self.0.get_mut(key.0 as usize) {
            *slot = None;
        }
    }
}
