//! A request's life.
//!
//! ```text
//!            submit
//!              |
//!           Posting ---- a provider's queue is full: parts wait here, posted again on each poll
//!              |
//!           InFlight --- every part is with its provider; the source stays borrowed
//!              |
//!      +-------+--------+
//!      |                |
//!   Drained(Ok)   Drained(Err)     the source is free; callback and event are delivered
//! ```
//!
//! Completion means only that the source may be reused. A wait whose deadline passes leaves the
//! request where it is: memory stays borrowed until the parts drain, or their peer is fenced, which
//! drains them with an error. An error means that nobody knows what was written; the engine then
//! poisons the group. No part is ever posted twice.

use crate::parts::{PartRule, Parts};
use crate::types::{Lane, Page, RequestId};
use std::ops::Range;
use weft_control::Rank;

/// Called once with the outcome, on the thread that makes progress.
pub type Callback = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Where a write goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Aim {
    pub peer: Rank,
    /// The peer's lane that it raises.
    pub lane: Lane,
    /// If this is a credit, the lane of ours that it refers to.
    pub credits: Option<Lane>,
}

/// A peer that a request writes to.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub aim: Aim,
    pub rule: PartRule,
    /// Its pages in the request's list.
    pub pages: Range<usize>,
    /// The number of its first part in the request, once that was offered.
    pub first_part: u32,
}

/// Why a request failed, and toward whom.
#[derive(Debug)]
pub(crate) struct Failure {
    pub why: String,
    pub target: Option<(Rank, Lane)>,
}

/// A request that did not end inside its submit.
#[derive(Default)]
pub(crate) struct Request {
    reuse: u32,
    live: bool,
    pub tag: u64,
    pub targets: Vec<Target>,
    pub pages: Vec<Page>,
    /// First target and part not yet taken by a provider.
    next_target: usize,
    next_part: usize,
    /// The parts of that target, once they were cut: a full queue may refuse them many times.
    parts: Parts,
    is_cut: bool,
    /// Parts that providers have taken, and which of those are under way, a bit each.
    taken: u32,
    in_flight: u32,
    open: Vec<u64>,
    failure: Option<Failure>,
    pub callback: Option<Callback>,
}

/// What a poster says of one part.
pub(crate) enum PostedPart {
    Done,
    InFlight,
    Full,
    Failed(String),
}

impl Request {
    /// Offers every part that no provider has taken yet, with its number, until one is refused.
    /// Returns whether all were taken.
    pub fn post(&mut self, mut post: impl FnMut(&Target, u32, &[Page]) -> PostedPart) -> bool {
        while let Some(target) = self.targets.get_mut(self.next_target) {
            if !std::mem::replace(&mut self.is_cut, true) {
                target.first_part = self.taken;
                self.parts.cut(target.rule, &self.pages[target.pages.clone()]);
            }
            while self.next_part < self.parts.len() {
                match post(target, self.taken, self.parts.part(self.next_part)) {
                    PostedPart::Done => {}
                    PostedPart::InFlight => {
                        let (word, bit) = place(self.taken);
                        self.open.resize(self.open.len().max(word + 1), 0);
                        self.open[word] |= bit;
                        self.in_flight += 1;
                    }
                    PostedPart::Full => return false,
                    PostedPart::Failed(why) => {
                        let target = Some((target.aim.peer, target.aim.lane));
                        self.abandon(Failure { why, target });
                        return true;
                    }
                }
                self.taken += 1;
                self.next_part += 1;
            }
            (self.next_part, self.is_cut) = (0, false);
            self.next_target += 1;
        }
        true
    }

    /// Gives up the parts that no provider has taken.
    pub fn abandon(&mut self, failure: Failure) {
        self.next_target = self.targets.len();
        (self.next_part, self.is_cut) = (0, false);
        self.failure.get_or_insert(failure);
    }

    /// A part has ended; `false` if it was not in flight.
    fn ended(&mut self, part: u32, result: Result<(), String>) -> bool {
        let (word, bit) = place(part);
        let Some(open) = self.open.get_mut(word).filter(|open| **open & bit != 0) else {
            return false;
        };
        *open &= !bit;
        self.in_flight -= 1;
        if let Err(why) = result {
            let toward = self.targets.iter().rev().find(|target| target.first_part <= part);
            let target = toward.map(|target| (target.aim.peer, target.aim.lane));
            self.abandon(Failure { why, target });
        }
        true
    }

    /// Whether no provider holds or will hold any part.
    pub fn is_drained(&self) -> bool {
        self.in_flight == 0 && self.next_target == self.targets.len()
    }

    /// The outcome, once drained.
    pub fn outcome(&mut self) -> Result<(), Failure> {
        self.failure.take().map_or(Ok(()), Err)
    }
}

/// Where the bit of a part is: its word and its mask.
fn place(part: u32) -> (usize, u64) {
    let part = part & Token::PART;
    (part as usize / 64, 1 << (part % 64))
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

    /// A blank request.
    pub fn open(&mut self) -> (RequestId, &mut Request) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Request::default());
            self.slots.len() as u32 - 1
        });
        let request = &mut self.slots[index as usize];
        request.live = true;
        request.targets.clear();
        request.pages.clear();
        request.open.clear();
        (request.next_target, request.next_part, request.is_cut) = (0, 0, false);
        (request.taken, request.in_flight) = (0, 0);
        self.live += 1;
        (RequestId { index, reuse: request.reuse }, request)
    }

    /// Forgets a drained request.
    pub fn close(&mut self, id: RequestId) {
        if let Some(request) = self.get(id) {
            request.live = false;
            request.reuse = request.reuse.wrapping_add(1);
            self.free.push(id.index);
            self.live -= 1;
        }
    }

    /// The request, unless it has been closed.
    pub fn get(&mut self, id: RequestId) -> Option<&mut Request> {
        self.slots.get_mut(id.index as usize).filter(|r| r.live && r.reuse == id.reuse)
    }

    /// A provider says that a part ended. Returns the request, or `None` if that part was not in
    /// flight: it has been completed before, or was never posted.
    pub fn ended(&mut self, token: u64, result: Result<(), String>) -> Option<RequestId> {
        let (index, reuse, part) = Token::read(token);
        let request = self.slots.get(index as usize)?;
        let id = RequestId { index, reuse: request.reuse };
        if !request.live || request.reuse & Token::REUSE != reuse {
            return None;
        }
        self.get(id)?.ended(part, result).then_some(id)
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

/// What providers see of a part: its request's place (24 bits), how often that was reused (16), and
/// the part's number (24). The last two wrap around, so a completion is taken for that of another part
/// only if 65,536 requests or 16 million parts lie between them.
pub(crate) struct Token;

impl Token {
    /// The number of places for requests.
    pub const PLACES: usize = 1 << 24;
    const REUSE: u32 = 0xffff;
    const PART: u32 = 0xff_ffff;

    pub fn of(id: RequestId, part: u32) -> u64 {
        let reuse = u64::from(id.reuse & Token::REUSE);
        (u64::from(id.index) << 40) | (reuse << 24) | u64::from(part & Token::PART)
    }

    fn read(token: u64) -> (u32, u32, u32) {
        ((token >> 40) as u32, (token >> 24) as u32 & Token::REUSE, token as u32 & Token::PART)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Generation, LaneId};

    fn posted(table: &mut Table, peers: &[u32]) -> (RequestId, Vec<u64>) {
        let (id, request) = table.open();
        for &peer in peers {
            let lane = Lane::new(LaneId::new(peer).unwrap(), Generation(0));
            let aim = Aim { peer: Rank(peer), lane, credits: None };
            let rule = PartRule::WHOLE;
            request.targets.push(Target { aim, rule, pages: 0..0, first_part: u32::MAX });
        }
        let mut tokens = Vec::new();
        let all = request.post(|_, part, _| {
            tokens.push(Token::of(id, part));
            PostedPart::InFlight
        });
        assert!(all);
        (id, tokens)
    }

    #[test]
    fn a_part_ends_once_however_often_it_is_completed() {
        let mut table = Table::default();
        let (id, tokens) = posted(&mut table, &[1, 2]);
        assert_eq!(table.ended(tokens[0], Ok(())), Some(id));
        assert_eq!(table.ended(tokens[0], Ok(())), None);
        assert!(!table.get(id).unwrap().is_drained());
        assert_eq!(table.ended(tokens[1], Ok(())), Some(id));
        assert!(table.get(id).unwrap().is_drained());
        table.close(id);
        let (_, next) = posted(&mut table, &[1]);
        assert_eq!(table.ended(tokens[0], Ok(())), None);
        assert_ne!(next[0], tokens[0]);
        assert_eq!(table.ended(u64::MAX, Ok(())), None);
    }

    #[test]
    fn a_failure_names_the_peer_of_the_part_that_failed() {
        let mut table = Table::default();
        let (id, tokens) = posted(&mut table, &[7, 8, 9]);
        table.ended(tokens[1], Err("broken".into()));
        table.ended(tokens[0], Ok(()));
        table.ended(tokens[2], Ok(()));
        let failure = table.get(id).unwrap().outcome().unwrap_err();
        assert_eq!(failure.target.map(|(peer, _)| peer), Some(Rank(8)));
    }
}
