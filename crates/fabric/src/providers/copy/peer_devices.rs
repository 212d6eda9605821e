//! Per-peer device state: reachable regions, mappings, and the parts in flight.

use super::engine::CopyEngine;
use super::outbox::Outbox;
use super::pinned::PinnedRegions;
use crate::id_map::RegionMap;
use crate::memory::Memory;
use rustix::fd::{AsFd, OwnedFd};

/// One peer's device state.
#[derive(Default)]
pub(super) struct PeerDevices {
    /// The peer's device regions, by the peer's keys.
    pub regions: RegionMap<DeviceRegion>,
    /// Pins on the peer's host memory as mapped here.
    pub pinned: PinnedRegions,
    pub outbox: Outbox,
}

/// A peer's device region.
pub(super) struct DeviceRegion {
    pub serial: u64,
    pub length: usize,
    /// Device that copies from host sources.
    pub home: u32,
    /// Descriptor for further mappings.
    pub descriptor: OwnedFd,
    /// Mappings by the device that copies to it.
    pub mapped: Vec<(u32, Memory)>,
}

impl DeviceRegion {
    /// Mapping for `device`.
    pub fn mapped_for(
        &mut self,
        engine: &mut dyn CopyEngine,
        device: u32,
    ) -> Result<&Memory, String> {
        let known = self.mapped.iter().position(|(by, _)| *by == device);
        let index = match known {
            Some(index) => index,
            None => {
                let memory = engine.import(device, self.descriptor.as_fd(), self.length)?;
                self.mapped.push((device, memory));
                self.mapped.len() - 1
            }
        };
        Ok(&self.mapped[index].1)
    }
}
