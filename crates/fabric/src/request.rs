//! A request's life.
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
//! A request under way is a token and a number of parts left. Completion means that the source may
//! be reused and that no byte waits in this process. A wait whose deadline passes leaves the request
//! where it is: memory stays borrowed until the parts drain, or their peer is fenced, which drains them
//! with an error. After an error the outcome of the write is unknown; the engine then poisons the group.
//! No part is ever posted twice.

use crate::types::{Lane, RegionKey, RequestId};
use std::collections::HashSet;
use weft_control::Rank;

/// Called once with the outcome, on the thread that makes progress.
pub type Callback = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Who asked for a request: a driver's own tag, or one of those below, which no driver's namespace has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tag(pub u64);

impl Tag {
    /// A credit, whose completion nothing waits for.
    pub const CREDIT: Tag = Tag(u64::MAX);
    /// A call, which asks for its request by number.
    pub const CALLER: Tag = Tag(u64::MAX - 1);

    #[inline(always)]
    pub fn is_credit(self) -> bool {
        self == Tag::CREDIT
    }

    #[inline(always)]
    pub fn is_of_driver(self) -> bool {
        self.0 < Tag::CALLER.0
    }
}

/// Where a write goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Aim {
    pub peer: Rank,
    /// The peer's lane that it raises.
    pub lane: Lane,
    /// For a credit, the lane of ours that it answers.
    pub credits: Option<Lane>,
}

/// Why a request failed, and toward which peer.
#[derive(Debug)]
pub(crate) struct Failure {
    pub why: String,
    pub peer: Rank,
}

/// A request that did not end inside its submit.
pub(crate) struct Request {
    reuse: u32,
    /// Parts that have not ended: queued, or under way. Zero in a free place.
    pub left: u32,
    /// In a free place, the next free one.
    next_free: u32,
    pub tag: Tag,
    /// The only peer that it writes to; [`Request::SEVERAL`] for a scatter.
    peer: Rank,
    /// The first region that it reads.
    source: Option<RegionKey>,
    /// It has one of the fields below; most requests have none.
    has_more: bool,
    /// Further regions that it reads, each once.
    more_sources: Vec<RegionKey>,
    failure: Option<Failure>,
    callback: Option<Callback>,
}

impl Request {
    /// In place of a peer, for a scatter.
    pub const SEVERAL: Rank = Rank(u32::MAX);

    /// The peer that it writes to, if that is one.
    pub fn peer(&self) -> Option<Rank> {
        (self.peer != Request::SEVERAL).then_some(self.peer)
    }

    /// Records that it reads a region.
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

    /// Records why a part failed; the first reason stays.
    #[cold]
    pub fn fail(&mut self, why: String, peer: Rank) {
        self.failure.get_or_insert(Failure { why, peer });
        self.has_more = true;
    }

    /// Sets the function that its end calls.
    pub fn call_at_end(&mut self, callback: Option<Callback>) {
        self.has_more |= callback.is_some();
        self.callback = callback;
    }

    /// Its failure and its callback, which it then lacks.
    pub fn take_outcome(&mut self) -> (Option<Failure>, Option<Callback>) {
        (self.failure.take(), self.callback.take())
    }
}

/// All requests under way; their memory is reused.
pub(crate) struct Table {
    slots: Vec<Request>,
    /// The first free place of a list of them; [`Table::NONE`] ends it.
    free: u32,
    under_way: usize,
    /// The most requests under way.
    limit: usize,
    /// Requests that ended with an error. The first of them poisons the group, which opens no more,
    /// so they are at most as many as were under way.
    failed: HashSet<RequestId>,
}

impl Table {
    const NONE: u32 = u32::MAX;

    /// A table for up to `limit` requests, with room for `capacity` of them before it allocates.
    pub fn new(limit: usize, capacity: usize) -> Table {
        let slots = Vec::with_capacity(capacity);
        Table { slots, free: Table::NONE, under_way: 0, limit, failed: HashSet::new() }
    }

    /// Whether as many requests are under way as may be.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.under_way >= self.limit
    }

    /// The place of the next request. Credits need one also in a full table.
    #[inline(always)]
    pub fn vacant(&mut self) -> Vacant<'_> {
        if self.free == Table::NONE {
            self.grow();
        }
        let Table { slots, free, under_way, .. } = self;
        let request = &mut slots[*free as usize];
        Vacant { id: RequestId { index: *free, reuse: request.reuse }, request, free, under_way }
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        self.slots.push(Request {
            reuse: 0,
            left: 0,
            next_free: Table::NONE,
            tag: Tag::default(),
            peer: Request::SEVERAL,
            source: None,
            has_more: false,
            more_sources: Vec::new(),
            failure: None,
            callback: None,
        });
        self.free = (self.slots.len() - 1) as u32;
    }

    /// Whether a request under way reads this region.
    pub fn read(&self, source: RegionKey) -> bool {
        self.slots.iter().any(|request| {
            let is_source =
                request.source == Some(source) || request.more_sources.contains(&source);
            request.left > 0 && is_source
        })
    }

    /// A blank request toward `peer`, with one part left, which a submit holds until all its parts are
    /// counted.
    #[inline(always)]
    pub fn open(&mut self, tag: Tag, peer: Rank) -> (RequestId, &mut Request) {
        let vacant = self.vacant();
        (vacant.id, vacant.open(tag, peer, None))
    }

    /// Removes a request of which no part is left.
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
            self.under_way -= 1;
        }
    }

    /// The request, unless it has been closed.
    #[inline]
    pub fn get(&mut self, id: RequestId) -> Option<&mut Request> {
        self.slots.get_mut(id.index as usize).filter(|request| request.reuse == id.reuse)
    }

    /// A part ended well. A request of which it was the last is closed, unless it has more to be dealt with
    /// than a tag.
    #[inline(always)]
    pub fn ended(&mut self, token: u64) -> Part {
        let Some((index, request)) = part(&mut self.slots, token) else { return Part::Stray };
        request.left -= 1;
        if request.left > 0 || request.has_more {
            let id = RequestId { index, reuse: request.reuse };
            return Part::Other { id, left: request.left };
        }
        request.reuse = request.reuse.wrapping_add(1);
        request.next_free = self.free;
        self.free = index;
        self.under_way -= 1;
        Part::Last { tag: request.tag }
    }

    /// A part failed. Returns its request, or `None` if that was closed before.
    pub fn failed(&mut self, token: u64, why: String) -> Option<RequestId> {
        let (index, request) = part(&mut self.slots, token)?;
        request.left -= 1;
        request.fail(why, Rank(token as u32 & Token::PEER));
        Some(RequestId { index, reuse: request.reuse })
    }

    /// Records that a request ended with an error, for later waits on it.
    #[cold]
    pub fn record_failure(&mut self, id: RequestId) {
        self.failed.insert(id);
    }

    /// Whether the request has ended with an error.
    pub fn has_failed(&self, id: RequestId) -> bool {
        id == RequestId::FAILED || self.failed.contains(&id)
    }

    /// How many are under way.
    #[inline]
    pub fn len(&self) -> usize {
        self.under_way
    }
}

/// The request under way that a part belongs to, and its place.
#[inline(always)]
fn part(slots: &mut [Request], token: u64) -> Option<(u32, &mut Request)> {
    let (index, reuse) = Token::place(token);
    let request = slots.get_mut(index as usize)?;
    (request.reuse & Token::REUSE == reuse && request.left > 0).then_some((index, request))
}

/// A free place, and the request that may be opened there.
pub(crate) struct Vacant<'a> {
    pub id: RequestId,
    request: &'a mut Request,
    free: &'a mut u32,
    under_way: &'a mut usize,
}

impl<'a> Vacant<'a> {
    /// A request toward `peer` with one part left, which reads this region.
    #[inline(always)]
    pub fn open(self, tag: Tag, peer: Rank, source: Option<RegionKey>) -> &'a mut Request {
        let Vacant { request, free, under_way, .. } = self;
        *free = request.next_free;
        *under_way += 1;
        (request.tag, request.peer, request.left, request.source) = (tag, peer, 1, source);
        request
    }
}

/// What the end of a part came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// It ended its request, which is closed.
    Last { tag: Tag },
    /// It belongs to this request, which has so many parts left.
    Other { id: RequestId, left: u32 },
    /// Its request was closed before.
    Stray,
}

impl RequestId {
    /// The request ended inside its submit.
    pub(crate) const DONE: RequestId = RequestId { index: u32::MAX, reuse: 0 };
    /// The request failed inside its submit, over an inline route.
    pub(crate) const FAILED: RequestId = RequestId { index: u32::MAX, reuse: 1 };
}

/// What links see of a part: its request's place (24 bits), how often that was reused (16, wrapping), and
/// the peer (24).
pub(crate) struct Token;

impl Token {
    /// The number of places for requests.
    pub const PLACES: usize = 1 << 24;
    const REUSE: u32 = 0xffff;
    const PEER: u32 = 0xff_ffff;

    #[inline]
    pub fn of(id: RequestId, peer: Rank) -> u64 {
        let reuse = u64::from(id.reuse & Token::REUSE);
        (u64::from(id.index) << 40) | (reuse << 24) | u64::from(peer.0 & Token::PEER)
    }

    /// A token of the same request toward another peer than rank 0.
    #[inline(always)]
    pub fn toward(token: u64, peer: Rank) -> u64 {
        token | u64::from(peer.0 & Token::PEER)
    }

    /// The request's place, and how often that was reused.
    #[inline(always)]
    fn place(token: u64) -> (u32, u32) {
        ((token >> 40) as u32, (token >> 24) as u32 & Token::REUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(table: &mut Table, peers: &[u32]) -> (RequestId, Vec<u64>) {
        let (id, request) = table.open(Tag(0), Request::SEVERAL);
        request.left = peers.len() as u32;
        (id, peers.iter().map(|&peer| Token::of(id, Rank(peer))).collect())
    }

    #[test]
    fn a_completion_of_a_request_that_was_closed_touches_no_other() {
        let mut table = Table::new(8, 0);
        let (id, tokens) = posted(&mut table, &[1, 2]);
        assert_eq!(table.ended(tokens[0]), Part::Other { id, left: 1 });
        assert_eq!(table.ended(tokens[1]), Part::Last { tag: Tag(0) });
        assert_eq!(table.ended(tokens[1]), Part::Stray);
        assert_eq!((table.len(), table.get(id).is_none()), (0, true));
        let (next, others) = posted(&mut table, &[1]);
        assert_eq!(table.ended(tokens[0]), Part::Stray);
        assert_ne!(others[0], tokens[0]);
        assert_eq!(table.get(next).unwrap().left, 1);
        assert_eq!(table.ended(u64::MAX), Part::Stray);
    }

    #[test]
    fn a_failure_names_the_peer_of_the_part_that_failed() {
        let mut table = Table::new(8, 0);
        let (id, tokens) = posted(&mut table, &[7, 8, 9]);
        assert_eq!(table.failed(tokens[1], "broken".into()), Some(id));
        table.ended(tokens[0]);
        assert_eq!(table.ended(tokens[2]), Part::Other { id, left: 0 });
        let failure = table.get(id).unwrap().take_outcome().0.unwrap();
        assert_eq!(failure.peer, Rank(8));
    }

    #[test]
    fn a_region_is_read_until_the_last_request_that_reads_it_is_closed() {
        let mut table = Table::new(8, 0);
        let [first, second] = [[1, 2, 1], [2, 2, 3]].map(|keys| {
            let (id, request) = table.open(Tag(0), Request::SEVERAL);
            keys.iter().for_each(|&key| request.reads(RegionKey(key)));
            id
        });
        let read = |table: &Table| [1, 2, 3, 4].map(|key| table.read(RegionKey(key)));
        assert_eq!(read(&table), [true, true, true, false]);
        table.close(first);
        assert_eq!(read(&table), [false, true, true, false]);
        table.close(second);
        assert_eq!(read(&table), [false; 4]);
        let (_, request) = table.open(Tag(0), Request::SEVERAL);
        assert!(!request.has_more);
        assert_eq!(read(&table), [false; 4]);
    }
}
