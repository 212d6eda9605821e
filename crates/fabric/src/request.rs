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
//! A request under way is a token and a number of parts left. Completion means only that the source may
//! be reused. A wait whose deadline passes leaves the request where it is: memory stays borrowed until
//! the parts drain, or their peer is fenced, which drains them with an error. After an error the outcome
//! of the write is unknown; the engine then poisons the group. No part is ever posted twice.

use crate::types::{Lane, RegionKey, RequestId};
use weft_control::Rank;

/// Called once with the outcome, on the thread that makes progress.
pub type Callback = Box<dyn FnOnce(Result<(), String>) + Send>;

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
#[derive(Default)]
pub(crate) struct Request {
    reuse: u32,
    live: bool,
    pub tag: u64,
    /// Parts that have not ended: queued, or under way.
    pub left: u32,
    /// Regions that it reads, each once.
    pub sources: Vec<RegionKey>,
    pub failure: Option<Failure>,
    pub callback: Option<Callback>,
}

impl Request {
    /// Records that it reads a region; whether that is new.
    #[inline]
    pub fn reads(&mut self, source: RegionKey) -> bool {
        let new = self.sources.last() != Some(&source) && !self.sources.contains(&source);
        if new {
            self.sources.push(source);
        }
        new
    }
}

/// All requests under way; their memory is reused.
#[derive(Default)]
pub(crate) struct Table {
    slots: Vec<Request>,
    free: Vec<u32>,
    live: usize,
}

impl Table {
    /// A table with room for `capacity` requests before it allocates.
    pub fn with_capacity(capacity: usize) -> Table {
        Table { slots: Vec::with_capacity(capacity), free: Vec::with_capacity(capacity), live: 0 }
    }

    /// A blank request, with one part left that stands for its submit.
    #[inline]
    pub fn open(&mut self) -> (RequestId, &mut Request) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Request::default());
            self.slots.len() as u32 - 1
        });
        let request = &mut self.slots[index as usize];
        request.live = true;
        (request.tag, request.left) = (0, 1);
        request.sources.clear();
        self.live += 1;
        (RequestId { index, reuse: request.reuse }, request)
    }

    /// Removes a drained request.
    #[inline]
    pub fn close(&mut self, id: RequestId) {
        if let Some(request) = self.get(id) {
            request.live = false;
            request.reuse = request.reuse.wrapping_add(1);
            self.free.push(id.index);
            self.live -= 1;
        }
    }

    /// The request, unless it has been closed.
    #[inline]
    pub fn get(&mut self, id: RequestId) -> Option<&mut Request> {
        self.slots.get_mut(id.index as usize).filter(|r| r.live && r.reuse == id.reuse)
    }

    /// A part ended. Returns its request, or `None` if that was closed before.
    #[inline]
    pub fn ended(&mut self, token: u64, result: Result<(), String>) -> Option<RequestId> {
        let (index, reuse, peer) = Token::read(token);
        let request = self.slots.get_mut(index as usize)?;
        if !request.live || request.reuse & Token::REUSE != reuse || request.left == 0 {
            return None;
        }
        request.left -= 1;
        if let Err(why) = result {
            request.failure.get_or_insert(Failure { why, peer });
        }
        Some(RequestId { index, reuse: request.reuse })
    }

    /// How many are under way.
    pub fn len(&self) -> usize {
        self.live
    }
}

impl RequestId {
    /// The request ended inside its submit.
    pub(crate) const DONE: RequestId = RequestId { index: u32::MAX, reuse: 0 };
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

    #[inline]
    fn read(token: u64) -> (u32, u32, Rank) {
        let peer = Rank(token as u32 & Token::PEER);
        ((token >> 40) as u32, (token >> 24) as u32 & Token::REUSE, peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(table: &mut Table, peers: &[u32]) -> (RequestId, Vec<u64>) {
        let (id, request) = table.open();
        request.left = peers.len() as u32;
        (id, peers.iter().map(|&peer| Token::of(id, Rank(peer))).collect())
    }

    #[test]
    fn a_completion_of_a_request_that_was_closed_touches_no_other() {
        let mut table = Table::default();
        let (id, tokens) = posted(&mut table, &[1, 2]);
        assert_eq!(table.ended(tokens[0], Ok(())), Some(id));
        assert_eq!(table.get(id).unwrap().left, 1);
        assert_eq!(table.ended(tokens[1], Ok(())), Some(id));
        assert_eq!(table.get(id).unwrap().left, 0);
        assert_eq!(table.ended(tokens[1], Ok(())), None);
        table.close(id);
        let (next, others) = posted(&mut table, &[1]);
        assert_eq!(table.ended(tokens[0], Ok(())), None);
        assert_ne!(others[0], tokens[0]);
        assert_eq!(table.get(next).unwrap().left, 1);
        assert_eq!(table.ended(u64::MAX, Ok(())), None);
    }

    #[test]
    fn a_failure_names_the_peer_of_the_part_that_failed() {
        let mut table = Table::default();
        let (id, tokens) = posted(&mut table, &[7, 8, 9]);
        table.ended(tokens[1], Err("broken".into()));
        table.ended(tokens[0], Ok(()));
        table.ended(tokens[2], Ok(()));
        let failure = table.get(id).unwrap().failure.take().unwrap();
        assert_eq!(failure.peer, Rank(8));
    }

    #[test]
    fn a_region_is_borrowed_once_by_each_request() {
        let mut table = Table::default();
        let (_, request) = table.open();
        let keys = [1, 1, 2, 1].map(|key| request.reads(RegionKey(key)));
        assert_eq!(keys, [true, false, true, false]);
    }
}
