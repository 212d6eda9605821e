//! A post's pages as stores and copies.

use super::{CopyLink, PageCopy};
use crate::link::WorkRequest;
use crate::memory::{Memory, MemoryKind};
use crate::types::Page;
use weft_control::Rank;

/// One page's copy.
struct DeviceCopy {
    device: u32,
    page: PageCopy,
    /// Kernels on the device reach both ranges.
    by_kernels: bool,
}

impl CopyLink {
    /// Device that copies a page; `None` if stores move it, or if a region that it names is unknown.
    pub(super) fn copying_device(&self, peer: Rank, page: &Page) -> Option<u32> {
        match self.local.memory(page.source)?.kind() {
            MemoryKind::Device(device) => Some(device),
            MemoryKind::Host => {
                let region = self.peers.get(peer)?.regions.get(page.destination)?;
                Some(region.home)
            }
        }
    }

    /// True if a page may be moved together with others: kernels do not reach user buffers on the host.
    pub(super) fn is_gathered(&self, device: u32, page: &Page) -> bool {
        let source = self.local.memory(page.source);
        let is_reached = source.is_some_and(|it| it.host().is_none() || it.descriptor().is_some());
        is_reached && self.engine.gathers(device, page.length)
    }

    /// Plans a page's copy.
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
        let mut by_kernels = source.host().is_none();
        if source.host().is_some() && source.descriptor().is_some() {
            // SAFETY: `deregister` drops the pin first, and dropping the link drops all pins.
            by_kernels = unsafe { pinned.pin(engine, device, page.source, source) };
        }
        let destination = match to_device {
            Some(region) => region.mapped_for(engine, device)?,
            None => {
                let memory = local.mapped(peer, page.destination).ok_or(OUTSIDE)?;
                // SAFETY: the pin is dropped before the mapping in `remove_remote`, `import` and `fence`.
                by_kernels &=
                    unsafe { devices.pinned.pin(engine, device, page.destination, memory) };
                memory
            }
        };
        let to = at(destination, page.destination_offset, page.length).ok_or(OUTSIDE)?;
        let page = PageCopy { to, from, length: page.length };
        Ok(DeviceCopy { device, page, by_kernels })
    }

    /// Adds a part's copies to queues; returns how many, and why it stopped early if it did.
    pub(super) fn enqueue(&mut self, work: &WorkRequest<'_>) -> (usize, Option<String>) {
        let mut added = 0;
        for page in work.pages.iter().filter(|page| page.length > 0) {
            let moved = match self.copying_device(work.peer, page) {
                Some(_) => self.enqueue_copy(work.peer, page).map(|()| added += 1),
                None => self.local.store(work.peer, page).ok_or("a page is out of bounds".into()),
            };
            if let Err(why) = moved {
                return (added, Some(why));
            }
        }
        (added, None)
    }

    fn enqueue_copy(&mut self, peer: Rank, page: &Page) -> std::result::Result<(), String> {
        let DeviceCopy { device, page, by_kernels } = self.plan(peer, page)?;
        let devices = self.peers.get_mut(peer);
        let devices = devices.ok_or("it is not connected over copy")?;
        // SAFETY: `plan` checked both ranges, the mapping and what kernels reach; both regions are kept until the
        // part is reported, which is after the part's event, or a fence.
        unsafe { devices.outbox.copy(&mut *self.engine, device, page, by_kernels) }
    }
}

/// Address of `length` bytes at `offset`, if they are all inside.
fn at(memory: &Memory, offset: u64, length: u64) -> Option<u64> {
    let inside = offset.checked_add(length)? <= memory.len() as u64;
    inside.then(|| memory.address() + offset)
}
