//! Pages of a post as stores and copies.

use super::CopyLink;
use crate::link::WorkRequest;
use crate::memory::{Memory, MemoryKind};
use crate::types::Page;
use weft_control::Rank;

/// Copy of one page: device, addresses, length.
struct DeviceCopy {
    device: u32,
    from: u64,
    to: u64,
    length: u64,
}

impl CopyLink {
    /// True if a page needs a copy engine; `None` if one of its regions is unknown.
    pub(super) fn needs_copy(&self, peer: Rank, page: &Page) -> Option<bool> {
        let devices = self.peers.get(peer)?;
        let to_device = devices.regions.get(page.destination).is_some();
        let source = self.local.memory(page.source)?;
        Some(to_device || source.kind() != MemoryKind::Host)
    }

    /// Plans the copy of a page.
    fn plan(&mut self, peer: Rank, page: &Page) -> std::result::Result<DeviceCopy, String> {
        const OUTSIDE: &str = "a page is out of bounds";
        let CopyLink { engine, local, peers, pinned, .. } = self;
        let engine = &mut **engine;
        let source = local.memory(page.source).ok_or(OUTSIDE)?;
        let from = at(source, page.source_offset, page.length).ok_or(OUTSIDE)?;
        let devices = peers.get_mut(peer);
        let devices = devices.ok_or("it is not connected over copy")?;
        let to_device = devices.regions.get_mut(page.destination);
        let device = match (source.kind(), &to_device) {
            (MemoryKind::Device(device), _) => device,
            (MemoryKind::Host, Some(region)) => region.home,
            (MemoryKind::Host, None) => return Err("host memory needs no copy engine".into()),
        };
        // User buffers are not pinned: they may share pages with other memory.
        if source.host().is_some() && source.descriptor().is_some() {
            // SAFETY: `deregister` drops the pin first, and the drop of the link drops all of them.
            unsafe { pinned.pin(engine, device, page.source, source) };
        }
        let destination = match to_device {
            Some(region) => region.mapped_for(engine, device)?,
            None => {
                let memory = local.mapped(peer, page.destination).ok_or(OUTSIDE)?;
                // SAFETY: the pin is dropped before the mapping in `remove_remote`, `import` and `fence`.
                unsafe { devices.pinned.pin(engine, device, page.destination, memory) };
                memory
            }
        };
        let to = at(destination, page.destination_offset, page.length).ok_or(OUTSIDE)?;
        Ok(DeviceCopy { device, from, to, length: page.length })
    }

    /// Adds the copies of a part to queues; returns their number and the cause of an early stop.
    pub(super) fn enqueue(&mut self, work: &WorkRequest<'_>) -> (usize, Option<String>) {
        let mut added = 0;
        for page in work.pages.iter().filter(|page| page.length > 0) {
            let moved = match self.needs_copy(work.peer, page) {
                Some(true) => self.enqueue_copy(work.peer, page).map(|()| added += 1),
                _ => self.local.store(work.peer, page).ok_or("a page is out of bounds".into()),
            };
            if let Err(why) = moved {
                return (added, Some(why));
            }
        }
        (added, None)
    }

    fn enqueue_copy(&mut self, peer: Rank, page: &Page) -> std::result::Result<(), String> {
        let DeviceCopy { device, from, to, length } = self.plan(peer, page)?;
        let devices = self.peers.get_mut(peer);
        let devices = devices.ok_or("it is not connected over copy")?;
        let queue = devices.outbox.queue(&mut *self.engine, device)?;
        // SAFETY: `plan` checked both ranges, and that the destination is mapped for this device. The engine keeps both
        // regions until the part is reported, which is after its event, or a fence.
        unsafe { self.engine.copy(queue, to, from, length) }
    }
}

/// Address of `length` bytes at `offset`, if they are all inside.
fn at(memory: &Memory, offset: u64, length: u64) -> Option<u64> {
    let inside = offset.checked_add(length)? <= memory.len() as u64;
    inside.then(|| memory.address() + offset)
}
