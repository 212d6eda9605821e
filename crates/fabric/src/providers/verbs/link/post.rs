//! Posts one part: a chain of RDMA writes, the last of which carries the lane as immediate.
//!
//! A reliable connection keeps order, so the last write's immediate reports that all writes have arrived.
//! A credit rides on it once both lanes have names; before, it precedes the part as a separate message.

use super::super::chains::ChainUse;
use super::super::config::MAX_PAGES;
use super::super::pair::Pair;
use super::super::peer::VerbsPeer;
use super::super::region::RegisteredRegion;
use super::super::sys::{self, SendRequest, Sge};
use crate::id_map::RegionMap;
use crate::link::WorkRequest;
use crate::types::{Page, TrafficClass};
use std::ptr::null_mut;

/// Post error.
pub enum PostError {
    /// Error number from the post.
    Provider(i32),
    /// Page outside the region or grant.
    Page(String),
}

impl From<i32> for PostError {
    fn from(error: i32) -> PostError {
        PostError::Provider(error)
    }
}

/// Work requests for a part. They already hold what all parts have in common; a post writes addresses,
/// keys, lengths and the immediate.
pub struct ChainTemplate {
    requests: Box<[SendRequest; MAX_PAGES as usize]>,
    ranges: Box<[Sge; MAX_PAGES as usize]>,
    /// An empty write.
    signal: SendRequest,
}

// SAFETY: the pointers lead from one request to the next and to the ranges, and are followed only while
// it is borrowed.
unsafe impl Send for ChainTemplate {}

impl ChainTemplate {
    pub fn new() -> ChainTemplate {
        let mut requests = Box::new([SendRequest::EMPTY; MAX_PAGES as usize]);
        let mut ranges = Box::new([Sge::default(); MAX_PAGES as usize]);
        let first = requests.as_mut_ptr();
        for (index, (request, range)) in requests.iter_mut().zip(ranges.iter_mut()).enumerate() {
            request.opcode = sys::IBV_WR_RDMA_WRITE;
            request.sg_list = range;
            request.num_sge = 1;
            // The last pointer is never followed: a chain is cut at the end.
            request.next = first.wrapping_add(index + 1);
        }
        // An empty write's address and key are not checked (InfiniBand specification, C9-88).
        let mut signal = SendRequest::EMPTY;
        signal.opcode = sys::IBV_WR_RDMA_WRITE_WITH_IMM;
        signal.send_flags = sys::IBV_SEND_SIGNALED;
        ChainTemplate { requests, ranges, signal }
    }

    /// Posts a part on the pair with this index. Returns how many arrivals it makes: two if a credit
    /// precedes it; `None` if the queue is full.
    #[inline(always)]
    pub fn post(
        &mut self,
        work: &WorkRequest<'_>,
        peer: &mut VerbsPeer,
        pair: usize,
        regions: &RegionMap<RegisteredRegion>,
    ) -> Result<Option<u32>, PostError> {
        let is_bulk = work.class == TrafficClass::Bulk;
        let chain_use = ChainUse::Part { token: work.token, is_bulk };
        if work.pages.len() > MAX_PAGES as usize {
            return Err(PostError::Page(format!("part of more than {MAX_PAGES} pages")));
        }
        let Pair { rail, remote_rail, .. } = peer.pairs[pair];
        let names = &peer.pairs[pair].sent;
        let carried = work.piggyback.map(|rider| names.immediate(work.lane, rider).ok_or(rider));
        let ahead = carried.and_then(Result::err);
        let requests = work.pages.len().max(1) + usize::from(ahead.is_some());
        if !peer.pairs[pair].has_room(requests as u32) {
            return Ok(None);
        }
        let (mut length, mut is_host_memory) = (0, true);
        for page in work.pages.iter().filter(|page| page.length > 0) {
            let region = self.write(length, page, peer, (rail, remote_rail), regions);
            is_host_memory &= region.map_err(PostError::Page)?.is_host_memory();
            length += 1;
        }
        let pair = &mut peer.pairs[pair];
        if let Some(rider) = ahead {
            pair.sent.enter(rider);
            self.post_signal(pair, rider.immediate(), ChainUse::Control)?;
        }
        let immediate = carried.and_then(Result::ok).unwrap_or_else(|| {
            pair.sent.enter(work.lane);
            work.lane.immediate()
        });
        if length == 0 {
            self.post_signal(pair, immediate, chain_use)?;
        } else {
            let inlined =
                length == 1 && is_host_memory && self.ranges[0].length <= pair.max_inline();
            // SAFETY: the ranges lie in registered regions, whose memory the engine keeps until the part has
            // ended; a fence drops the pair.
            unsafe { self.post_chain(length, pair, immediate, inlined, chain_use)? };
        }
        Ok(Some(1 + u32::from(ahead.is_some())))
    }

    /// Fills in the request for one page; returns the source's region.
    #[inline(always)]
    fn write<'a>(
        &mut self,
        index: usize,
        page: &Page,
        peer: &mut VerbsPeer,
        (rail, remote_rail): (usize, usize),
        regions: &'a RegionMap<RegisteredRegion>,
    ) -> Result<&'a RegisteredRegion, String> {
        let Page { source, source_offset, destination, destination_offset, length } = *page;
        let region = regions.get(source);
        let range = region.and_then(|region| region.source(rail).range(source_offset, length));
        let target = peer.granted.destination(remote_rail, destination, destination_offset, length);
        let (Some(region), Some(range), Some(target)) = (region, range, target) else {
            return Err(refusal(page, peer, range.is_some()));
        };
        let request = &mut self.requests[index];
        request.remote_addr = target.base;
        request.rkey = target.key as u32;
        self.ranges[index] = range;
        Ok(region)
    }

    /// Posts an empty write.
    ///
    /// # Errors
    /// Error number from the post.
    #[inline(always)]
    pub fn post_signal(
        &mut self,
        pair: &mut Pair,
        immediate: u32,
        chain_use: ChainUse,
    ) -> Result<(), i32> {
        self.signal.wr_id = pair.request_id();
        self.signal.imm_data = immediate.to_be();
        // SAFETY: one request without a range.
        unsafe { pair.post(&raw mut self.signal, 1, chain_use) }
    }

    /// Posts the first `length` requests.
    ///
    /// # Safety
    /// Same as [`Pair::post`].
    #[inline(always)]
    unsafe fn post_chain(
        &mut self,
        length: usize,
        pair: &mut Pair,
        immediate: u32,
        inlined: bool,
        chain_use: ChainUse,
    ) -> Result<(), i32> {
        let id = pair.request_id();
        // Flushed requests complete although they ask for no completion.
        self.requests[..length].iter_mut().for_each(|request| request.wr_id = id);
        let last = &mut self.requests[length - 1];
        let next = std::mem::replace(&mut last.next, null_mut());
        last.opcode = sys::IBV_WR_RDMA_WRITE_WITH_IMM;
        last.imm_data = immediate.to_be();
        last.send_flags = sys::IBV_SEND_SIGNALED | if inlined { sys::IBV_SEND_INLINE } else { 0 };
        // SAFETY: by the caller's contract; the chain ends with the last request.
        let posted = unsafe { pair.post(self.requests.as_mut_ptr(), length as u32, chain_use) };
        let last = &mut self.requests[length - 1];
        (last.next, last.opcode, last.send_flags) = (next, sys::IBV_WR_RDMA_WRITE, 0);
        posted
    }
}

/// Reason why a page cannot be written.
#[cold]
#[inline(never)]
fn refusal(page: &Page, peer: &mut VerbsPeer, has_source: bool) -> String {
    if !has_source {
        return format!("source outside of region {}", page.source.0);
    }
    peer.granted.refusal(page.destination, page.destination_offset, page.length)
}
