//! One part's ranges, as addressed through one NIC.

use super::super::super::granted_regions::RemoteMemory;
use super::super::peer::OfiPeer;
use super::super::rail::{MAX_RANGES, Rail, RmaWrite};
use super::super::region::{RegisteredRegion, Source};
use super::super::slots::SlotUse;
use super::super::sys;
use crate::id_map::RegionMap;
use crate::types::Page;
use std::ffi::c_void;
use std::sync::Arc;

/// Source and destination for one page.
pub struct PageRange {
    /// True for a source in host memory.
    pub is_host_memory: bool,
    pub source: libc::iovec,
    pub descriptor: *mut c_void,
    pub destination: sys::RmaRange,
}

impl PageRange {
    /// `None` if the source is outside the region, or the destination outside the grant.
    #[inline(always)]
    pub fn of(
        page: &Page,
        regions: &RegionMap<Arc<RegisteredRegion>>,
        peer: &mut OfiPeer,
        rail: usize,
    ) -> Option<PageRange> {
        let Page { source, source_offset, destination, destination_offset, length } = *page;
        let region = regions.get(source)?.source(rail);
        let source = region.range(source_offset, length)?;
        let (_, destination) = peer.destination(rail, destination, destination_offset, length)?;
        let Source { is_host_memory, descriptor, .. } = region;
        Some(PageRange { is_host_memory, source, descriptor, destination })
    }

    /// Reason why [`PageRange::of`] is `None`.
    #[cold]
    #[inline(never)]
    pub fn refusal(
        page: &Page,
        regions: &RegionMap<Arc<RegisteredRegion>>,
        peer: &mut OfiPeer,
        rail: usize,
    ) -> String {
        let region = regions.get(page.source);
        if region.and_then(|it| it.source(rail).range(page.source_offset, page.length)).is_none() {
            return format!("source outside of region {}", page.source.0);
        }
        peer.refusal(page.destination, page.destination_offset, page.length)
    }
}

/// Ranges for a part with several pages, or none.
pub struct RangeList {
    sources: [libc::iovec; MAX_RANGES],
    descriptors: [*mut c_void; MAX_RANGES],
    destinations: [sys::RmaRange; MAX_RANGES],
    count: usize,
}

impl RangeList {
    pub fn new() -> RangeList {
        let null = std::ptr::null_mut();
        RangeList {
            sources: [libc::iovec { iov_base: null, iov_len: 0 }; MAX_RANGES],
            descriptors: [null; MAX_RANGES],
            destinations: [sys::RmaRange { addr: 0, len: 0, key: 0 }; MAX_RANGES],
            count: 0,
        }
    }

    pub fn push(&mut self, slice: PageRange) -> Result<(), String> {
        let RangeList { sources, descriptors, destinations, count } = self;
        if *count == MAX_RANGES {
            return Err(format!("part of more than {MAX_RANGES} pages"));
        }
        sources[*count] = slice.source;
        descriptors[*count] = slice.descriptor;
        destinations[*count] = slice.destination;
        *count += 1;
        Ok(())
    }

    /// Posts a [`Rail::write`] with these ranges.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn write(
        &mut self,
        rail: &mut Rail,
        end: (sys::Address, RemoteMemory),
        immediate: u64,
        slot_use: SlotUse,
    ) -> Result<bool, i32> {
        let RangeList { sources, descriptors, destinations, count } = self;
        if *count == 0 {
            return rail.signal(end, immediate, 0, slot_use);
        }
        let mut message = RmaWrite {
            address: end.0,
            sources: &sources[..*count],
            descriptors: &mut descriptors[..*count],
            destinations: &destinations[..*count],
            immediate,
        };
        // SAFETY: by the caller's contract.
        unsafe { rail.write(&mut message, 0, slot_use) }
    }
}
