//! Peers, as far as devices are concerned.

use super::copier::{Copier, Why};
use super::outbox::Outbox;
use super::pins::Pins;
use crate::memory::Memory;
use rustix::fd::{AsFd, OwnedFd};

/// A peer, as far as devices are concerned.
#[derive(Default)]
pub(super) struct Far {
    /// Its regions of device memory, by its keys.
    pub regions: Vec<Option<FarRegion>>,
    /// Of its host memory, as it is mapped here.
    pub pins: Pins,
    pub outbox: Outbox,
}

/// A peer's region of device memory.
pub(super) struct FarRegion {
    pub serial: u64,
    pub length: usize,
    /// Copies what has no device at its source.
    pub home: u32,
    /// To map it for one more device.
    pub descriptor: OwnedFd,
    /// As it is mapped for each device that copies to it.
    pub mapped: Vec<(u32, Memory)>,
}

impl FarRegion {
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
