//! Per-peer device state: reachable regions and their mappings, and the parts under way.

use super::copier::{Copier, Why};
use super::outbox::Outbox;
use super::pins::Pins;
use crate::memory::Memory;
use rustix::fd::{AsFd, OwnedFd};

/// The device state of one peer.
#[derive(Default)]
pub(super) struct PeerDevices {
    /// Its regions of device memory, by its keys.
    pub regions: Vec<Option<DeviceRegion>>,
    /// Pins of its host memory, as it is mapped here.
    pub pins: Pins,
    pub outbox: Outbox,
}

/// A peer's region of device memory.
pub(super) struct DeviceRegion {
    pub serial: u64,
    pub length: usize,
    /// The device that copies from sources of host memory.
    pub home: u32,
    /// To map it for one more device.
    pub descriptor: OwnedFd,
    /// As it is mapped for each device that copies to it.
    pub mapped: Vec<(u32, Memory)>,
}

impl DeviceRegion {
    /// The region as `device` reaches it.
    pub fn reached_by(&mut self, copier: &mut dyn Copier, device: u32) -> Result<&Memory, Why> {
        let known = self.mapped.iter().position(|(by, _)| *by == device);
        let index = match known {
            Some(index) => index,
            None => {
                let memory = copier.import(device, self.descriptor.as_fd(), self.length)?;
                self.mapped.push((device, memory));
                self.mapped.len() - 1
            }
        };
        Ok(&self.mapped[index].1)
    }
}
