//! Regions that are released and granted again, some at a freed memory's address.

use crate::common::{Member, MemberConfig, fill, region, take};
use crate::provider::{Provider, Shape, settle, waited};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ptr::NonNull;
use weft_fabric::{Memory, MemoryKind, Page, Rank, Region, RemoteRegion};

const LENGTH: usize = 64 << 10;

/// Writes all of `source` to `to` in the next round, and checks the peer's source bytes in `inbox`.
fn cross(member: &mut Member, source: &Region, to: RemoteRegion, inbox: &Region, value: u8) {
    let (peer, counter) = (to.peer, member.counter);
    let round = member.engine.next_round(counter, peer).unwrap();
    let page = Page {
        source: source.key(),
        source_offset: 0,
        destination: to.key,
        destination_offset: 0,
        length: LENGTH as u64,
    };
    let raises = member.raises(peer, [LENGTH]);
    waited(|w| {
        member.engine.wait_for_credit(counter, peer, round, w)?;
        let request = member.engine.write(peer, counter, round, &[page])?;
        member.engine.wait(counter, &[(peer, raises)], w)?;
        assert!(take(inbox, 0, LENGTH).iter().all(|seen| *seen == value), "turn {value}");
        member.engine.credit(peer, counter)?;
        member.engine.wait_for_request(request, w)
    })
    .unwrap();
}

pub fn a_region_takes_the_key_of_one_that_was_released(provider: &Provider) {
    let joining = MemberConfig { source: LENGTH, ..MemberConfig::default() };
    provider.group(Shape::Default, joining, 2, |member, gather| {
        let peer = Rank(1 - member.engine.rank().0);
        let mut keys = Vec::new();
        let mut before: Option<(Region, Vec<u8>)> = None;
        for turn in 1..=6u8 {
            let inbox = region(&mut member.engine, provider.places.inbox, LENGTH);
            keys.push(inbox.key());
            let remote = member.exchange_regions(peer, &inbox, gather);
            fill(&member.source, 0, LENGTH, turn);
            let source = member.source.clone();
            cross(member, &source, remote, &inbox, turn);
            if let Some((old, bytes)) = before.take() {
                assert!(take(&old, 0, LENGTH) == bytes, "turn {turn}");
            }
            settle(member);
            member.engine.remove_remote(peer, remote.key);
            member.engine.release(&inbox);
            // Every other region is freed, so that the next may take the same address.
            let bytes = take(&inbox, 0, LENGTH);
            before = turn.is_multiple_of(2).then_some((inbox, bytes));
            settle(member);
        }
        assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    });
}

/// Anonymous memory, unmapped when it is dropped.
struct Mapping(NonNull<u8>);

// SAFETY: plain memory, owned only by the mapping.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps memory at any address, or exactly at `at` if that is free.
    fn new(at: Option<usize>) -> Option<Mapping> {
        let fixed = if at.is_some() { MapFlags::FIXED_NOREPLACE } else { MapFlags::empty() };
        let (address, access) = (at.unwrap_or(0) as *mut _, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping, which replaces none.
        let mapped = unsafe { mmap_anonymous(address, LENGTH, access, MapFlags::PRIVATE | fixed) };
        Some(Mapping(NonNull::new(mapped.ok()?.cast())?))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this object's mapping, without references.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), LENGTH) };
    }
}

/// Registered user buffers at one address, each mapped after the one before was unmapped, and destinations
/// that the allocator may place at an earlier address.
pub fn memory_at_the_address_of_freed_memory_is_other_memory(provider: &Provider) {
    let joining = MemberConfig { source: LENGTH, ..MemberConfig::default() };
    provider.group(Shape::Default, joining, 2, |member, gather| {
        let peer = Rank(1 - member.engine.rank().0);
        let mut address = None;
        let mut reused = 0;
        for turn in 1..=8u8 {
            // Another thread may have mapped memory there.
            let mapping = Mapping::new(address).or_else(|| Mapping::new(None)).unwrap();
            reused += u32::from(address == Some(mapping.0.as_ptr() as usize));
            address = Some(mapping.0.as_ptr() as usize);
            let begin = mapping.0;
            // SAFETY: the mapping owns it.
            let memory =
                unsafe { Memory::user_buffer(begin, LENGTH, MemoryKind::Host, Box::new(mapping)) };
            let source = member.engine.register(memory).unwrap();
            fill(&source, 0, LENGTH, turn);
            let inbox = region(&mut member.engine, provider.places.inbox, LENGTH);
            let remote = member.exchange_regions(peer, &inbox, gather);
            cross(member, &source, remote, &inbox, turn);
            settle(member);
            member.engine.remove_remote(peer, remote.key);
            member.engine.release(&source);
            member.engine.release(&inbox);
            settle(member);
        }
        assert!(reused > 0, "no mapping reused an earlier address");
    });
}
