//! Posts pages: one-page parts from one prepared `fi_msg_rma`.
//!
//! Scatters have only such parts. A peer keeps the address, and for each NIC the key and bounds for the last
//! written region ([`super::super::peer`]): a part fills in offsets, length and immediate. Whatever else a
//! part may need is left to `post.rs`.

use super::super::peer::OfiPeer;
use super::super::post_limits::PostLimits;
use super::super::rail::Rail;
use super::super::region::{RegisteredRegion, Source};
use super::super::slots::SlotUse;
use super::super::sys;
use super::super::wire::immediate;
use crate::id_map::{PeerMap, RegionMap};
use crate::lane_table::LaneTable;
use crate::link::{PostStatus, Scatter, ScatterPart, ScatterStatus};
use crate::providers::presence::PeerState;
use crate::types::{Page, RegionKey, TrafficClass};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// Message for a page. It already holds what all pages have in common.
pub struct PageTemplate(Box<PageWork>);

struct PageWork {
    message: sys::RmaMessage,
    range: libc::iovec,
    descriptor: *mut c_void,
    destination: sys::RmaRange,
    /// Region and NIC that `source` belongs to.
    recent: Option<(RegionKey, usize)>,
    /// The last page's source: most scatters have one.
    source: Source,
}

// SAFETY: the pointers lead to the fields beside them and to a registration's descriptor, and are followed
// only while it is borrowed.
unsafe impl Send for PageTemplate {}

/// Link state for a run.
pub struct PageLink<'a> {
    pub rails: &'a mut [Rail],
    pub peers: &'a mut PeerMap<OfiPeer>,
    pub regions: &'a RegionMap<Arc<RegisteredRegion>>,
    pub lanes: &'a LaneTable,
    pub limits: PostLimits,
}

/// Reason why a run ended before the last part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// Nothing was done for the next part, which `post.rs` posts.
    Unprepared,
    /// The provider accepts no more now.
    Full,
    /// Error number for the next part, on the rail with this index.
    Failed(i32, usize),
}

impl PageTemplate {
    pub fn new() -> PageTemplate {
        let mut work = Box::new(PageWork {
            message: sys::RmaMessage {
                msg_iov: null_mut(),
                desc: null_mut(),
                iov_count: 1,
                addr: 0,
                rma_iov: null_mut(),
                rma_iov_count: 1,
                context: null_mut(),
                data: 0,
            },
            range: libc::iovec { iov_base: null_mut(), iov_len: 0 },
            descriptor: null_mut(),
            destination: sys::RmaRange { addr: 0, len: 0, key: 0 },
            recent: None,
            source: Source::EMPTY,
        });
        work.message.msg_iov = &raw const work.range;
        work.message.desc = &raw mut work.descriptor;
        work.message.rma_iov = &raw const work.destination;
        PageTemplate(work)
    }

    /// Discards the last page's source, whose region may be gone.
    pub fn discard_source(&mut self) {
        self.0.recent = None;
    }

    /// Posts a scatter's parts behind the ones that `posted` counts, and counts them there.
    #[inline(always)]
    pub fn post_run(
        &mut self,
        scatter: &Scatter<'_>,
        link: &mut PageLink<'_>,
        posted: &mut ScatterStatus,
    ) -> RunEnd {
        for part in &scatter.parts[posted.taken..] {
            match self.0.post(scatter, part, link) {
                Ok(status) => {
                    posted.taken += 1;
                    posted.in_flight += u32::from(status == PostStatus::InFlight);
                }
                Err(end) => return end,
            }
        }
        RunEnd::Unprepared
    }
}

impl PageWork {
    /// Posts a page on the peer's next NIC. Unprepared, without a change: an empty page, a peer that is not
    /// open, a full queue, and a page outside the region or grant.
    #[inline(always)]
    fn post(
        &mut self,
        scatter: &Scatter<'_>,
        part: &ScatterPart,
        link: &mut PageLink<'_>,
    ) -> Result<PostStatus, RunEnd> {
        let PageLink { rails, peers, regions, lanes, limits } = link;
        let Page { source, source_offset, destination, destination_offset, length } = part.page;
        let is_bulk = scatter.class == TrafficClass::Bulk;
        let peer = peers.get_mut(part.peer).ok_or(RunEnd::Unprepared)?;
        let is_open = length > 0 && peer.state == PeerState::Open;
        if !is_open || !peer.may_post(limits.max_parts, is_bulk, lanes) {
            return Err(RunEnd::Unprepared);
        }
        let index = peer.coming_rail();
        let rail = &mut rails[index];
        if !rail.has_room() || !self.find_source(source, index, regions) {
            return Err(RunEnd::Unprepared);
        }
        let range = self.source.range(source_offset, length).ok_or(RunEnd::Unprepared)?;
        let target = peer.destination(index, destination, destination_offset, length);
        let (address, target) = target.ok_or(RunEnd::Unprepared)?;
        (self.range, self.destination) = (range, target);
        (self.message.addr, self.message.data) = (address, immediate(part.lane, None));
        let injects = self.source.is_host_memory && limits.injects(length);
        // SAFETY: the region holds the source's memory, which the engine keeps until the part has ended, as
        // does the link's `kept` after a fence; the message's pointers lead to the fields above.
        let taken = unsafe {
            if injects {
                rail.inject(address, &self.range, &self.destination, self.message.data)
            } else {
                let token = scatter.token(part);
                let slot_use = SlotUse::Part { token, peer: part.peer.0, is_bulk };
                rail.post_message(&mut self.message, 0, slot_use)
            }
        };
        peer.next_rail();
        match taken {
            Ok(true) => {
                let status = if injects { PostStatus::Done } else { PostStatus::InFlight };
                peer.posted(status, is_bulk);
                Ok(status)
            }
            Ok(false) => Err(RunEnd::Full),
            Err(error) => Err(RunEnd::Failed(error, index)),
        }
    }

    /// Makes a region, as registered with one NIC, the source; false if it is unknown.
    #[inline(always)]
    fn find_source(
        &mut self,
        key: RegionKey,
        rail: usize,
        regions: &RegionMap<Arc<RegisteredRegion>>,
    ) -> bool {
        if self.recent != Some((key, rail)) {
            let Some(region) = regions.get(key) else { return false };
            (self.recent, self.source) = (Some((key, rail)), region.source(rail));
            self.descriptor = self.source.descriptor;
        }
        true
    }
}
