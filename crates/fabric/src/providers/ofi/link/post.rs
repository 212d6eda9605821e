//! Posts one part to a NIC: copied inside the call, or in flight.

use super::super::peer::OfiPeer;
use super::super::post_limits::PostLimits;
use super::super::rail::{Rail, RmaWrite};
use super::super::region::RegisteredRegion;
use super::super::slots::SlotUse;
use super::super::wire::immediate;
use super::ranges::{PageRange, RangeList};
use crate::id_map::RegionMap;
use crate::link::{PostStatus, WorkRequest};
use crate::types::{Page, TrafficClass};
use std::sync::Arc;

/// Post error.
pub enum PostError {
    /// Error number from the provider.
    Provider(i32),
    /// Page outside the region or grant.
    Page(String),
}

impl From<i32> for PostError {
    fn from(error: i32) -> PostError {
        PostError::Provider(error)
    }
}

/// Part to post.
pub struct PartPost<'a> {
    pub work: &'a WorkRequest<'a>,
    pub rail: &'a mut Rail,
    pub peer: &'a mut OfiPeer,
    /// Rail index.
    pub index: usize,
    pub limits: PostLimits,
}

/// True if the provider accepted the part, with the accepted part's status.
type PostResult = Result<(bool, PostStatus), PostError>;

impl PartPost<'_> {
    #[inline(always)]
    pub fn part(&mut self, regions: &RegionMap<Arc<RegisteredRegion>>) -> PostResult {
        match self.work.pages {
            [] => self.signal(),
            [page] if page.length > 0 => self.page(page, regions),
            pages => self.pages(pages, regions),
        }
    }

    #[inline(always)]
    fn signal(&mut self) -> PostResult {
        let (end, immediate) = (self.peer.endpoints[self.index], self.immediate());
        if self.limits.max_injected.is_some() {
            return Ok((self.rail.inject_signal(end, immediate)?, PostStatus::Done));
        }
        Ok((self.rail.signal(end, immediate, 0, self.slot_use())?, PostStatus::InFlight))
    }

    #[inline(always)]
    fn page(&mut self, page: &Page, regions: &RegionMap<Arc<RegisteredRegion>>) -> PostResult {
        let (immediate, slot_use) = (self.immediate(), self.slot_use());
        let PartPost { rail, peer, index, limits, .. } = self;
        let Some(slice) = PageRange::of(page, regions, peer, *index) else {
            return Err(PostError::Page(PageRange::refusal(page, regions, peer, *index)));
        };
        let PageRange { is_host_memory, source, mut descriptor, destination } = slice;
        let address = peer.endpoints[*index].0;
        if is_host_memory && limits.injects(page.length) {
            // SAFETY: the region holds the source's memory.
            let taken = unsafe { rail.inject(address, &source, &destination, immediate) };
            return Ok((taken?, PostStatus::Done));
        }
        let mut message = RmaWrite {
            address,
            sources: &[source],
            descriptors: std::slice::from_mut(&mut descriptor),
            destinations: &[destination],
            immediate,
        };
        // SAFETY: the engine keeps sources until the part has ended, as does the link's `kept` after a
        // fence.
        let taken = unsafe { rail.write(&mut message, 0, slot_use) };
        Ok((taken?, PostStatus::InFlight))
    }

    fn pages(&mut self, pages: &[Page], regions: &RegionMap<Arc<RegisteredRegion>>) -> PostResult {
        let (immediate, slot_use) = (self.immediate(), self.slot_use());
        let PartPost { rail, peer, index, .. } = self;
        let mut ranges = RangeList::new();
        for page in pages.iter().filter(|page| page.length > 0) {
            let slice = PageRange::of(page, regions, peer, *index)
                .ok_or_else(|| PostError::Page(PageRange::refusal(page, regions, peer, *index)))?;
            ranges.push(slice).map_err(PostError::Page)?;
        }
        // SAFETY: as in `page`.
        let taken = unsafe { ranges.write(rail, peer.endpoints[*index], immediate, slot_use) };
        Ok((taken?, PostStatus::InFlight))
    }

    #[inline(always)]
    fn immediate(&self) -> u64 {
        immediate(self.work.lane, self.work.piggyback)
    }

    #[inline(always)]
    fn slot_use(&self) -> SlotUse {
        let WorkRequest { token, peer, class, .. } = *self.work;
        SlotUse::Part { token, peer: peer.0, is_bulk: class == TrafficClass::Bulk }
    }
}
