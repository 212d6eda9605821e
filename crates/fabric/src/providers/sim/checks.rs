//! What must never happen, and the ledger that tells when it did.

use crate::types::{LaneId, Page, RegionKey, Time};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use weft_control::Rank;

/// A rule of the counted write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Breach {
    /// A part was posted onto bytes that another part in flight, or landed and not yet credited, holds.
    Overlap,
    /// A part was posted onto bytes that were not granted to its source.
    OutsideGrant,
    /// Source bytes changed between post and completion.
    SourceChanged,
    /// A region was released while a part in flight read it.
    SourceReleased,
    /// A region was released while a part in flight wrote it.
    DestinationReleased,
    /// Credit was given while parts of that round were still in flight.
    EarlyCredit,
    /// A lane stands higher than the parts posted to it.
    RaisedBeyondPosted,
    /// An engine reported that its group is poisoned before it had cut off this peer.
    NotFenced,
}

/// A breach of the rules by a driver, an engine or a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// When.
    pub at: Time,
    /// Which rule.
    pub breach: Breach,
    /// Who broke it.
    pub rank: Rank,
    /// The other end of the part, or of the lane.
    pub peer: Rank,
    /// Which bytes of whose region, where the rule is about bytes.
    pub bytes: Option<(Rank, RegionKey, Range<u64>)>,
    /// The lane, in its owner's numbers.
    pub lane: Option<LaneId>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Violation { at, breach, rank, peer, .. } = self;
        write!(f, "{breach:?} at {} ns by {rank} toward {peer}", at.0)?;
        if let Some((owner, key, range)) = &self.bytes {
            write!(f, ", bytes {}..{} of region {} of {owner}", range.start, range.end, key.0)?;
        }
        self.lane.map_or(Ok(()), |lane| write!(f, ", lane {}", lane.get()))
    }
}

/// Bytes that a part has claimed in an owner's region.
struct Held {
    end: u64,
    part: u64,
    landed: bool,
}

/// One owner's bytes and lanes.
#[derive(Default)]
pub(super) struct Ledger {
    /// By region and first byte; never overlapping.
    held: BTreeMap<(RegionKey, u64), Held>,
    lanes: BTreeMap<LaneId, LaneLedger>,
}

#[derive(Default)]
struct LaneLedger {
    posted: u64,
    in_flight: u64,
    claims: Vec<(RegionKey, u64)>,
}

impl Ledger {
    /// A part toward `lane` is under way.
    pub fn posted(&mut self, lane: LaneId) {
        let lane = self.lanes.entry(lane).or_default();
        lane.posted += 1;
        lane.in_flight += 1;
    }

    /// A part toward `lane` has landed, failed or vanished.
    pub fn ended(&mut self, lane: LaneId) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.in_flight -= 1;
        }
    }

    /// Parts ever posted to `lane`.
    pub fn posted_to(&self, lane: LaneId) -> u64 {
        self.lanes.get(&lane).map_or(0, |lane| lane.posted)
    }

    /// Parts under way to `lane`.
    pub fn in_flight_to(&self, lane: LaneId) -> u64 {
        self.lanes.get(&lane).map_or(0, |lane| lane.in_flight)
    }

    /// Claims a page's destination for a part, or says which bytes of it are held already.
    pub fn claim(&mut self, part: u64, lane: LaneId, page: &Page) -> Result<(), Range<u64>> {
        let (key, begin) = (page.destination, page.destination_offset);
        let end = begin + page.length;
        if begin == end {
            return Ok(());
        }
        if let Some((&(_, other), held)) = self.held.range((key, 0)..(key, end)).next_back()
            && held.end > begin
        {
            return Err(begin.max(other)..end.min(held.end));
        }
        self.held.insert((key, begin), Held { end, part, landed: false });
        self.lanes.entry(lane).or_default().claims.push((key, begin));
        Ok(())
    }

    /// A part's page has landed.
    pub fn landed(&mut self, part: u64, page: &Page) {
        let held = self.held.get_mut(&(page.destination, page.destination_offset));
        if let Some(held) = held.filter(|held| held.part == part) {
            held.landed = true;
        }
    }

    /// The owner gives credit for `lane`: frees what has landed under it and returns those bytes.
    pub fn credited(&mut self, lane: LaneId) -> Vec<(RegionKey, Range<u64>)> {
        let Some(lane) = self.lanes.get_mut(&lane) else { return Vec::new() };
        let mut freed = Vec::with_capacity(lane.claims.len());
        lane.claims.retain(|&(key, begin)| {
            let Some(held) = self.held.get(&(key, begin)) else { return false };
            if held.landed {
                freed.push((key, begin..held.end));
                self.held.remove(&(key, begin));
                return false;
            }
            true
        });
        freed
    }

    /// The owner has released a region.
    pub fn forget(&mut self, region: RegionKey) {
        self.held.retain(|(key, _), _| *key != region);
        for lane in self.lanes.values_mut() {
            lane.claims.retain(|(key, _)| *key != region);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_refused_exactly_where_bytes_are_held() {
        let lane = LaneId::new(3).unwrap();
        let page = |begin: u64, end: u64| Page {
            source: RegionKey(0),
            source_offset: 0,
            destination: RegionKey(1),
            destination_offset: begin,
            length: end - begin,
        };
        let mut ledger = Ledger::default();
        assert_eq!(ledger.claim(1, lane, &page(10, 20)), Ok(()));
        assert_eq!(ledger.claim(2, lane, &page(30, 40)), Ok(()));
        assert_eq!(ledger.claim(3, lane, &page(20, 30)), Ok(()));
        assert_eq!(ledger.claim(4, lane, &page(0, 10)), Ok(()));
        assert_eq!(ledger.claim(5, lane, &page(15, 15)), Ok(()));
        assert_eq!(ledger.claim(6, lane, &page(19, 21)), Err(20..21));
        assert_eq!(ledger.claim(6, lane, &page(39, 50)), Err(39..40));
        ledger.landed(2, &page(30, 40));
        assert_eq!(ledger.credited(lane), [(RegionKey(1), 30..40)]);
        assert_eq!(ledger.claim(7, lane, &page(30, 50)), Ok(()));
        assert_eq!(ledger.claim(8, lane, &page(12, 13)), Err(12..13));
    }
}
