//! From the pages of a post to stores and copies.

use super::CopyLink;
use super::copier::Why;
use crate::link::Work;
use crate::memory::{Memory, Place};
use crate::types::Page;
use weft_control::Rank;

/// A copy that a post needs: by which device, from where, to where, how long.
struct Copy {
    device: u32,
    from: u64,
    to: u64,
    length: u64,
}

impl CopyLink {
    /// Whether copy engines are needed for a page; `None` if one of its regions is not known.
    pub(super) fn needs_engines(&self, peer: Rank, page: &Page) -> Option<bool> {
        let devices = self.peers.get(peer.0 as usize)?.as_ref()?;
        let to_device =
            devices.regions.get(page.destination.0 as usize).is_some_and(Option::is_some);
        let source = self.local.memory(page.source)?;
        Some(to_device || source.place() != Place::Host)
    }

    /// The copy that moves a page.
    fn plan(&mut self, peer: Rank, page: &Page) -> std::result::Result<Copy, Why> {
        const OUTSIDE: &str = "a page is out of bounds";
        let CopyLink { copier, local, peers, pins, .. } = self;
        let copier = &mut **copier;
        let source = local.memory(page.source).ok_or(OUTSIDE)?;
        let from = at(source, page.source_offset, page.length).ok_or(OUTSIDE)?;
        let devices = peers.get_mut(peer.0 as usize).and_then(Option::as_mut);
        let devices = devices.ok_or("it is not connected over copy")?;
        let to_device =
            devices.regions.get_mut(page.destination.0 as usize).and_then(Option::as_mut);
        let device = match (source.place(), &to_device) {
            (Place::Device(device), _) => device,
            (Place::Host, Some(region)) => region.home,
            (Place::Host, None) => return Err("host memory needs no copy engine".into()),
        };
        // What the user lends is not pinned: others may have pages in common with it.
        if source.host().is_some() && source.descriptor().is_some() {
            // SAFETY: `deregister` forgets the pin first, and the provider's end all of them.
            unsafe { pins.pin(copier, device, page.source, source) };
        }
        let destination = match to_device {
            Some(region) => region.reached_by(copier, device)?,
            None => {
                let memory = local.mapped(peer, page.destination).ok_or(OUTSIDE)?;
                // SAFETY: the pin is forgotten before the mapping in `forget`, `import` and `fence`.
                unsafe { devices.pins.pin(copier, device, page.destination, memory) };
                memory
            }
        };
        let to = at(destination, page.destination_offset, page.length).ok_or(OUTSIDE)?;
        Ok(Copy { device, from, to, length: page.length })
    }

    /// Adds the copies of a part to queues, as many as go; why it stopped, if it did.
    pub(super) fn enqueue(&mut self, work: &Work<'_>) -> (usize, Option<Why>) {
        let mut added = 0;
        for page in work.pages.iter().filter(|page| page.length > 0) {
            let moved = match self.needs_engines(work.peer, page) {
                Some(true) => self.add_copy(work.peer, page).map(|()| added += 1),
                _ => self.local.store(work.peer, page).ok_or("a page is out of bounds".into()),
            };
            if let Err(why) = moved {
                return (added, Some(why));
            }
        }
        (added, None)
    }

    fn add_copy(&mut self, peer: Rank, page: &Page) -> std::result::Result<(), Why> {
        let Copy { device, from, to, length } = self.plan(peer, page)?;
        let devices = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut);
        let devices = devices.ok_or("it is not connected over copy")?;
        let queue = devices.outbox.queue(&mut *self.copier, device)?;
        // SAFETY: `plan` checked that both ranges lie inside their regions and had the destination
        // mapped for this device. The engine keeps the source, and keeps `forget` and `deregister`
        // away from both, until the part is reported; that is after its mark, or a fence.
        unsafe { self.copier.copy(queue, to, from, length) }
    }
}

/// The address of `length` bytes at `offset`, if they are all inside.
fn at(memory: &Memory, offset: u64, length: u64) -> Option<u64> {
    let inside = offset.checked_add(length)? <= memory.len() as u64;
    inside.then(|| memory.address() + offset)
}
