//! Request table and request states.
//!
//! ```text
//!            submit
//!              |
//!           Queued ----- the queue toward a peer is full: the rest of that peer's write waits in the
//!              |         peer's own queue ([`crate::engine`]) and delays no other peer
//!           InFlight --- every part is with its link; the sources stay borrowed
//!              |
//!      +-------+--------+
//!      |                |
//!   Drained(Ok)   Drained(Err)     the sources are free; callback and event are delivered
//! ```
//!
//! A request in flight is a token and a count of parts left. Completion means that the source may be
//! reused and that all bytes have left this process. A wait that passes the deadline leaves the request
//! in flight: memory stays borrowed until the parts drain, or until the peer is fenced, which drains them
//! with an error. After an error the write's outcome is unknown; the engine then poisons the group. Each
//! part is posted once.

use crate::types::{Lane, RegionKey, RequestId};
use std::collections::HashSet;
use weft_control::Rank;

/// Called once with the outcome, on the thread that makes progress.
pub type CompletionCallback = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Request origin: a driver's tag, or one of the constants below, which are outside all namespaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestTag(pub u64);

impl RequestTag {
    /// A credit, or a write with [`crate::Requests::NO_EVENT`]: no caller waits until it completes.
    pub const CREDIT: RequestTag = RequestTag(u64::MAX);
    /// A call, which queries the request by id.
    pub const CALLER: RequestTag = RequestTag(u64::MAX - 1);

    #[inline(always)]
    pub fn is_credit(self) -> bool {
        self == RequestTag::CREDIT
    }

    #[inline(always)]
    pub fn is_of_driver(self) -> bool {
        self.0 < RequestTag::CALLER.0
    }
}

/// Write destination: a peer and a lane there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneTarget {
    pub peer: Rank,
    /// The peer's lane that it raises.
    pub lane: Lane,
    /// For a credit, our lane whose round it releases.
    pub credits: Option<Lane>,
}

/// Cause of a failed request, and the peer.
#[derive(Debug)]
pub(crate) struct RequestFailure {
    pub why: String,
    pub peer: Rank,
}

/// A request that did not end inside the submit.
pub(crate) struct Request {
    reuse: u32,
    /// Parts that have not ended: queued or in flight. Zero in a free slot.
    pub left: u32,
    /// In a free slot, the next free one.
    next_free: u32,
    pub tag: RequestTag,
    /// The only peer that it writes to; [`Request::SEVERAL`] for a scatter.
    peer: Rank,
    /// The first region that it reads.
    source: Option<RegionKey>,
    /// True if a field below is set; most requests have none.
    has_more: bool,
    /// Further regions that it reads, each once.
    more_sources: Vec<RegionKey>,
    failure: Option<RequestFailure>,
    callback: Option<CompletionCallback>,
}

impl Request {
    /// Peer value for a scatter.
    pub const SEVERAL: Rank = Rank(u32::MAX);

    /// The peer that it writes to; `None` for a scatter.
    pub fn peer(&self) -> Option<Rank> {
        (self.peer != Request::SEVERAL).then_some(self.peer)
    }

    /// Adds a region that it reads.
    #[inline]
    pub fn reads(&mut self, source: RegionKey) {
        match self.source {
            None => self.source = Some(source),
            Some(first) if first == source => {}
            Some(_) => self.reads_more(source),
        }
    }

    #[inline(never)]
    fn reads_more(&mut self, source: RegionKey) {
        if !self.more_sources.contains(&source) {
            self.more_sources.push(source);
            self.has_more = true;
        }
    }

    /// Records why a part failed; the first cause stays.
    #[cold]
    pub fn fail(&mut self, why: String, peer: Rank) {
        self.failure.get_or_insert(RequestFailure { why, peer });
        self.has_more = true;
    }

    /// Sets the completion callback.
    pub fn call_at_end(&mut self, callback: Option<CompletionCallback>) {
        self.has_more |= callback.is_some();
        self.callback = callback;
    }

    /// Takes the failure and the callback.
    pub fn take_outcome(&mut self) -> (Option<RequestFailure>, Option<CompletionCallback>) {
        (self.failure.take(), self.callback.take())
    }
}

/// All requests in flight; slots are reused.
pub(crate) struct RequestTable {
    slots: Vec<Request>,
    /// Head of the free slot list; [`RequestTable::NONE`] ends it.
    free: u32,
    in_flight: usize,
    /// Limit for requests in flight.
    limit: usize,
    /// Failed requests. The first one poisons the group, which opens no more requests, so there are no
    /// more than the requests then in flight.
    failed: HashSet<RequestId>,
}

impl RequestTable {
    const NONE: u32 = u32::MAX;

    /// A table for up to `limit` requests, with `capacity` slots reserved.
    pub fn new(limit: usize, capacity: usize) -> RequestTable {
        let slots = Vec::with_capacity(capacity);
        RequestTable {
            slots,
            free: RequestTable::NONE,
            in_flight: 0,
            limit,
            failed: HashSet::new(),
        }
    }

    /// True at the limit for requests in flight.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.in_flight >= self.limit
    }

    /// Slot for the next request. Credits take one even in a full table.
    #[inline(always)]
    pub fn free_slot(&mut self) -> FreeSlot<'_> {
        if self.free == RequestTable::NONE {
            self.grow();
        }
        let RequestTable { slots, free, in_flight, .. } = self;
        let request = &mut slots[*free as usize];
        FreeSlot { id: RequestId { index: *free, reuse: request.reuse }, request, free, in_flight }
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        self.slots.push(Request {
            reuse: 0,
            left: 0,
            next_free: RequestTable::NONE,
            tag: RequestTag::default(),
            peer: Request::SEVERAL,
            source: None,
            has_more: false,
            more_sources: Vec::new(),
            failure: None,
            callback: None,
        });
        self.free = (self.slots.len() - 1) as u32;
    }

    /// True if a request in flight reads this region.
    pub fn read(&self, source: RegionKey) -> bool {
        self.slots.iter().any(|request| {
            let is_source =
                request.source == Some(source) || request.more_sources.contains(&source);
            request.left > 0 && is_source
        })
    }

    /// A new request toward `peer` with one part left, which the submit holds until all parts are counted.
    #[inline(always)]
    pub fn open(&mut self, tag: RequestTag, peer: Rank) -> (RequestId, &mut Request) {
        let free_slot = self.free_slot();
        (free_slot.id, free_slot.open(tag, peer, None))
    }

    /// Removes a request without parts left.
    #[inline]
    pub fn close(&mut self, id: RequestId) {
        let free = self.free;
        if let Some(request) = self.get(id) {
            request.left = 0;
            request.has_more = false;
            request.more_sources.clear();
            request.reuse = request.reuse.wrapping_add(1);
            request.next_free = free;
            self.free = id.index;
            self.in_flight -= 1;
        }
    }

    /// The request, unless it has been closed.
    #[inline]
    pub fn get(&mut self, id: RequestId) -> Option<&mut Request> {
        self.slots.get_mut(id.index as usize).filter(|request| request.reuse == id.reuse)
    }

    /// Completes a part. Closes the request with the last part, unless the request has a callback, a
    /// failure or further sources.
    #[inline(always)]
    pub fn ended(&mut self, token: u64) -> PartEnd {
        let Some((index, request)) = part(&mut self.slots, token) else { return PartEnd::Stray };
        request.left -= 1;
        if request.left > 0 || request.has_more {
            let id = RequestId { index, reuse: request.reuse };
            return PartEnd::Other { id, left: request.left };
        }
        request.reuse = request.reuse.wrapping_add(1);
        request.next_free = self.free;
        self.free = index;
        self.in_flight -= 1;
        PartEnd::Last { tag: request.tag }
    }

    /// Fails a part. Returns the request, or `None` if that was closed before.
    pub fn failed(&mut self, token: u64, why: String) -> Option<RequestId> {
        let (index, request) = part(&mut self.slots, token)?;
        request.left -= 1;
        request.fail(why, Rank(token as u32 & PartToken::PEER));
        Some(RequestId { index, reuse: request.reuse })
    }

    /// Records a failed request for later waits on it.
    #[cold]
    pub fn record_failure(&mut self, id: RequestId) {
        self.failed.insert(id);
    }

    /// True if the request has ended with an error.
    pub fn has_failed(&self, id: RequestId) -> bool {
        id == RequestId::FAILED || self.failed.contains(&id)
    }

    /// Requests in flight.
    #[inline]
    pub fn len(&self) -> usize {
        self.in_flight
    }
}

/// A part's request in flight, and the slot.
#[inline(always)]
fn part(slots: &mut [Request], token: u64) -> Option<(u32, &mut Request)> {
    let (index, reuse) = PartToken::slot(token);
    let request = slots.get_mut(index as usize)?;
    (request.reuse & PartToken::REUSE == reuse && request.left > 0).then_some((index, request))
}

/// Free table slot, in which a request may be opened.
pub(crate) struct FreeSlot<'a> {
    pub id: RequestId,
    request: &'a mut Request,
    free: &'a mut u32,
    in_flight: &'a mut usize,
}

impl<'a> FreeSlot<'a> {
    /// A request toward `peer` with one part left, which reads this region.
    #[inline(always)]
    pub fn open(self, tag: RequestTag, peer: Rank, source: Option<RegionKey>) -> &'a mut Request {
        let FreeSlot { request, free, in_flight, .. } = self;
        *free = request.next_free;
        *in_flight += 1;
        (request.tag, request.peer, request.left, request.source) = (tag, peer, 1, source);
        request
    }
}

/// Effect that a part's end has on the request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PartEnd {
    /// The last part: the request is closed.
    Last { tag: RequestTag },
    /// The request has `left` parts left, or more to clean up.
    Other { id: RequestId, left: u32 },
    /// The request was closed before.
    Stray,
}

impl RequestId {
    /// Completed inside the submit.
    pub(crate) const DONE: RequestId = RequestId { index: u32::MAX, reuse: 0 };
    /// Failed inside the submit, over an inline route.
    pub(crate) const FAILED: RequestId = RequestId { index: u32::MAX, reuse: 1 };
}

/// Part token for links: request slot (24 bits), slot reuse count (16 bits, wrapping), peer (24 bits).
pub(crate) struct PartToken;

impl PartToken {
    /// Slot limit. The last index is a wrapped link's own (`providers/staged`).
    pub const SLOTS: usize = (1 << 24) - 1;
    const REUSE: u32 = 0xffff;
    const PEER: u32 = 0xff_ffff;

    #[inline]
    pub fn of(id: RequestId, peer: Rank) -> u64 {
        let reuse = u64::from(id.reuse & PartToken::REUSE);
        (u64::from(id.index) << 40) | (reuse << 24) | u64::from(peer.0 & PartToken::PEER)
    }

    /// The same request's token toward another peer than rank 0.
    #[inline(always)]
    pub fn toward(token: u64, peer: Rank) -> u64 {
        token | u64::from(peer.0 & PartToken::PEER)
    }

    /// Slot and reuse count.
    #[inline(always)]
    fn slot(token: u64) -> (u32, u32) {
        ((token >> 40) as u32, (token >> 24) as u32 & PartToken::REUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(table: &mut RequestTable, peers: &[u32]) -> (RequestId, Vec<u64>) {
        let (id, request) = table.open(RequestTag(0), Request::SEVERAL);
        request.left = peers.len() as u32;
        (id, peers.iter().map(|&peer| PartToken::of(id, Rank(peer))).collect())
    }

    #[test]
    fn a_completion_of_a_closed_request_affects_no_other() {
        let mut table = RequestTable::new(8, 0);
        let (id, tokens) = posted(&mut table, &[1, 2]);
        assert_eq!(table.ended(tokens[0]), PartEnd::Other { id, left: 1 });
        assert_eq!(table.ended(tokens[1]), PartEnd::Last { tag: RequestTag(0) });
        assert_eq!(table.ended(tokens[1]), PartEnd::Stray);
        assert_eq!((table.len(), table.get(id).is_none()), (0, true));
        let (next, others) = posted(&mut table, &[1]);
        assert_eq!(table.ended(tokens[0]), PartEnd::Stray);
        assert_ne!(others[0], tokens[0]);
        assert_eq!(table.get(next).unwrap().left, 1);
        assert_eq!(table.ended(u64::MAX), PartEnd::Stray);
    }

    #[test]
    fn a_failure_names_the_peer_of_the_part_that_failed() {
        let mut table = RequestTable::new(8, 0);
        let (id, tokens) = posted(&mut table, &[7, 8, 9]);
        assert_eq!(table.failed(tokens[1], "broken".into()), Some(id));
        table.ended(tokens[0]);
        assert_eq!(table.ended(tokens[2]), PartEnd::Other { id, left: 0 });
        let failure = table.get(id).unwrap().take_outcome().0.unwrap();
        assert_eq!(failure.peer, Rank(8));
    }

    #[test]
    fn a_region_is_read_until_the_last_request_that_reads_it_is_closed() {
        let mut table = RequestTable::new(8, 0);
        let [first, second] = [[1, 2, 1], [2, 2, 3]].map(|keys| {
            let (id, request) = table.open(RequestTag(0), Request::SEVERAL);
            keys.iter().for_each(|&key| request.reads(RegionKey(key)));
            id
        });
        let read = |table: &RequestTable| [1, 2, 3, 4].map(|key| table.read(RegionKey(key)));
        assert_eq!(read(&table), [true, true, true, false]);
        table.close(first);
        assert_eq!(read(&table), [false, true, true, false]);
        table.close(second);
        assert_eq!(read(&table), [false; 4]);
        let (_, request) = table.open(RequestTag(0), Request::SEVERAL);
        assert!(!request.has_more);
        assert_eq!(read(&table), [false; 4]);
    }
}
