//! Posts pages: one-page parts as one RDMA write with immediate, without a chain.
//!
//! Scatters consist of such parts. Whatever else a part may need is left to `post.rs`.

use super::super::chains::ChainUse;
use super::super::peer::VerbsPeer;
use super::super::region::{RegisteredRegion, Source};
use super::super::sys::{self, SendRequest, Sge};
use crate::id_map::{PeerMap, RegionMap};
use crate::lane_table::LaneTable;
use crate::link::{Scatter, ScatterPart};
use crate::providers::presence::PeerState;
use crate::types::{Page, RegionKey, TrafficClass};

/// Work request for a page. It already holds what all pages have in common; a post writes addresses,
/// keys, length, immediate and identity.
pub struct PageTemplate(Box<PageWork>);

struct PageWork {
    request: SendRequest,
    range: Sge,
    /// Region and NIC that `source` belongs to.
    recent: Option<(RegionKey, usize)>,
    /// Source of the last page: most scatters have one.
    source: Source,
}

// SAFETY: the pointer leads to the range beside it, and is followed only while it is borrowed.
unsafe impl Send for PageTemplate {}

/// Outcome of [`PageTemplate::post_run`].
pub struct Run {
    /// Parts posted.
    pub posted: usize,
    /// Error number for the next post.
    pub error: Option<i32>,
}

impl PageTemplate {
    pub fn new() -> PageTemplate {
        let (mut request, range) = (SendRequest::EMPTY, Sge::default());
        (request.opcode, request.num_sge) = (sys::IBV_WR_RDMA_WRITE_WITH_IMM, 1);
        let mut work = Box::new(PageWork { request, range, recent: None, source: Source::EMPTY });
        work.request.sg_list = &mut work.range;
        PageTemplate(work)
    }

    /// Discards the last page's source, whose region may be gone.
    pub fn discard_source(&mut self) {
        self.0.recent = None;
    }

    /// Posts a scatter's parts from `first` on, up to one that is refused or takes more than a page: see
    /// [`PageWork::post`].
    #[inline(always)]
    pub fn post_run(
        &mut self,
        scatter: &Scatter<'_>,
        first: usize,
        peers: &mut PeerMap<VerbsPeer>,
        regions: &RegionMap<RegisteredRegion>,
        lanes: &LaneTable,
    ) -> Run {
        let mut posted = 0;
        for part in &scatter.parts[first..] {
            let Some(peer) = peers.get_mut(part.peer) else { break };
            match self.0.post(scatter, part, peer, regions, lanes) {
                Ok(true) => posted += 1,
                Ok(false) => break,
                Err(error) => return Run { posted, error: Some(error) },
            }
        }
        Run { posted, error: None }
    }
}

impl PageWork {
    /// Posts a page on the peer's next pair. False, without a change, for an empty page, a peer that is
    /// not open, a full queue, and a page outside the region or grant.
    ///
    /// # Errors
    /// Error number from the post.
    #[inline(always)]
    fn post(
        &mut self,
        scatter: &Scatter<'_>,
        part: &ScatterPart,
        peer: &mut VerbsPeer,
        regions: &RegionMap<RegisteredRegion>,
        lanes: &LaneTable,
    ) -> Result<bool, i32> {
        let Page { source, source_offset, destination, destination_offset, length } = part.page;
        let is_bulk = scatter.class == TrafficClass::Bulk;
        if length == 0 || peer.state != PeerState::Open || !peer.may_post(1, is_bulk, lanes) {
            return Ok(false);
        }
        let Some((pair, granted)) = peer.coming_pair() else { return Ok(false) };
        if !pair.has_room(1) || !self.find_source(source, pair.rail, regions) {
            return Ok(false);
        }
        let nic = pair.remote_rail;
        let target = granted.destination(nic, destination, destination_offset, length);
        let (Some(range), Some(target)) = (self.source.range(source_offset, length), target) else {
            return Ok(false);
        };
        let is_inlined = self.source.is_host_memory && range.length <= pair.max_inline();
        self.range = range;
        self.request.wr_id = pair.request_id();
        self.request.imm_data = part.lane.immediate().to_be();
        self.request.send_flags =
            sys::IBV_SEND_SIGNALED | if is_inlined { sys::IBV_SEND_INLINE } else { 0 };
        (self.request.remote_addr, self.request.rkey) = (target.base, target.key as u32);
        let chain_use = ChainUse::Part { token: scatter.token(part), is_bulk };
        // SAFETY: a one-request chain, whose range lies in a registered region. The engine keeps that
        // memory until the part has ended; a fence drops the pair.
        unsafe { pair.post(&mut self.request, 1, chain_use)? };
        pair.sent.enter(part.lane);
        peer.next_pair();
        peer.posted(1, is_bulk);
        Ok(true)
    }

    /// Makes a region, as registered with one NIC, the source; false if it is unknown.
    #[inline(always)]
    fn find_source(
        &mut self,
        key: RegionKey,
        rail: usize,
        regions: &RegionMap<RegisteredRegion>,
    ) -> bool {
        if self.recent != Some((key, rail)) {
            let Some(region) = regions.get(key) else { return false };
            (self.recent, self.source) = (Some((key, rail)), region.source(rail));
        }
        true
    }
}
