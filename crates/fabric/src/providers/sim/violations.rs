//! Counted write rules, and the ledger that detects violations.

use crate::types::{LaneId, Page, RegionKey, Time};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use weft_control::Rank;

/// Counted write rule that was violated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ViolationKind {
    /// Part posted onto bytes that another part in flight claims, or that landed and are not yet
    /// credited.
    Overlap,
    /// Part posted onto bytes that were not granted to the source.
    OutsideGrant,
    /// Source bytes changed between post and completion.
    SourceChanged,
    /// Region released while a part in flight read it.
    SourceReleased,
    /// Region released while a part in flight wrote it.
    DestinationReleased,
    /// Credit given while parts in that round were in flight.
    EarlyCredit,
    /// Lane value above the number of parts posted to it.
    RaisedBeyondPosted,
    /// Engine that reported a poisoned group before it had fenced this peer.
    NotFenced,
}

/// Violation by a driver, an engine or a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Violation time.
    pub at: Time,
    /// Violated rule.
    pub kind: ViolationKind,
    /// Rank that violated it.
    pub rank: Rank,
    /// Peer at the other end of the part or lane.
    pub peer: Rank,
    /// Bytes in an owner's region, for rules about bytes.
    pub bytes: Option<(Rank, RegionKey, Range<u64>)>,
    /// Lane, in the owner's numbering.
    pub lane: Option<LaneId>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Violation { at, kind, rank, peer, .. } = self;
        write!(f, "{kind:?} at {} ns by {rank} toward {peer}", at.0)?;
        if let Some((owner, key, range)) = &self.bytes {
            write!(f, ", bytes {}..{} of region {} of {owner}", range.start, range.end, key.0)?;
        }
        self.lane.map_or(Ok(()), |lane| write!(f, ", lane {}", lane.get()))
    }
}

/// Bytes in an owner's region claimed by a part; the key holds the first.
struct Claim {
    end: u64,
    part: u64,
    lane: LaneId,
    landed: bool,
}

/// One owner's claims and lanes.
#[derive(Default)]
pub(super) struct Ledger {
    /// By region and first byte; without overlap.
    claims: BTreeMap<(RegionKey, u64), Claim>,
    lanes: BTreeMap<LaneId, LaneLedger>,
}

#[derive(Default)]
struct LaneLedger {
    posted: u64,
    in_flight: u64,
    claims: Vec<(RegionKey, u64)>,
}

impl Ledger {
    /// Records a part posted toward `lane`.
    pub fn posted(&mut self, lane: LaneId) {
        let lane = self.lanes.entry(lane).or_default();
        lane.posted += 1;
        lane.in_flight += 1;
    }

    /// Records that a part toward `lane` has landed, failed or been discarded.
    pub fn ended(&mut self, lane: LaneId) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.in_flight -= 1;
        }
    }

    /// Total parts posted to `lane`.
    pub fn posted_to(&self, lane: LaneId) -> u64 {
        self.lanes.get(&lane).map_or(0, |lane| lane.posted)
    }

    /// Parts in flight to `lane`.
    pub fn in_flight_to(&self, lane: LaneId) -> u64 {
        self.lanes.get(&lane).map_or(0, |lane| lane.in_flight)
    }

    /// Claims a page's destination for a part. With `reuse` it takes over bytes from parts that have
    /// landed.
    ///
    /// # Errors
    /// Bytes in the page that are already claimed.
    pub fn claim(
        &mut self,
        part: u64,
        lane: LaneId,
        page: &Page,
        reuse: bool,
    ) -> Result<(), Range<u64>> {
        let (key, begin) = (page.destination, page.destination_offset);
        let end = begin + page.length;
        if begin == end {
            return Ok(());
        }
        while let Some((&(_, other), claim)) = self.claims.range((key, 0)..(key, end)).next_back()
            && claim.end > begin
        {
            if !reuse || !claim.landed {
                return Err(begin.max(other)..end.min(claim.end));
            }
            self.claims.remove(&(key, other));
        }
        self.claims.insert((key, begin), Claim { end, part, lane, landed: false });
        self.lanes.entry(lane).or_default().claims.push((key, begin));
        Ok(())
    }

    /// Records that a part's page has landed.
    pub fn landed(&mut self, part: u64, page: &Page) {
        let claim = self.claims.get_mut(&(page.destination, page.destination_offset));
        if let Some(claim) = claim.filter(|claim| claim.part == part) {
            claim.landed = true;
        }
    }

    /// Releases the landed claims on `lane`, as the owner gives credit; returns the claimed bytes.
    pub fn credited(&mut self, lane: LaneId) -> Vec<(RegionKey, Range<u64>)> {
        let owner = lane;
        let Some(lane) = self.lanes.get_mut(&lane) else { return Vec::new() };
        let mut freed = Vec::with_capacity(lane.claims.len());
        lane.claims.retain(|&(key, begin)| {
            let claim = self.claims.get(&(key, begin)).filter(|claim| claim.lane == owner);
            let Some(claim) = claim else { return false };
            if claim.landed {
                freed.push((key, begin..claim.end));
                self.claims.remove(&(key, begin));
                return false;
            }
            true
        });
        freed
    }

    /// Drops the claims on a released region.
    pub fn remove_region(&mut self, region: RegionKey) {
        self.claims.retain(|(key, _), _| *key != region);
        for lane in self.lanes.values_mut() {
            lane.claims.retain(|(key, _)| *key != region);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_refused_exactly_where_bytes_are_claimed() {
        let lane = LaneId::new(3).unwrap();
        let page = |begin: u64, end: u64| Page {
            source: RegionKey(0),
            source_offset: 0,
            destination: RegionKey(1),
            destination_offset: begin,
            length: end - begin,
        };
        let mut ledger = Ledger::default();
        assert_eq!(ledger.claim(1, lane, &page(10, 20), false), Ok(()));
        assert_eq!(ledger.claim(2, lane, &page(30, 40), false), Ok(()));
        assert_eq!(ledger.claim(3, lane, &page(20, 30), false), Ok(()));
        assert_eq!(ledger.claim(4, lane, &page(0, 10), false), Ok(()));
        assert_eq!(ledger.claim(5, lane, &page(15, 15), false), Ok(()));
        assert_eq!(ledger.claim(6, lane, &page(19, 21), false), Err(20..21));
        assert_eq!(ledger.claim(6, lane, &page(39, 50), false), Err(39..40));
        ledger.landed(2, &page(30, 40));
        assert_eq!(ledger.credited(lane), [(RegionKey(1), 30..40)]);
        assert_eq!(ledger.claim(7, lane, &page(30, 50), false), Ok(()));
        assert_eq!(ledger.claim(8, lane, &page(12, 13), false), Err(12..13));
    }

    #[test]
    fn bytes_that_have_landed_may_be_claimed_again_where_that_is_allowed() {
        let (lane, other) = (LaneId::new(3).unwrap(), LaneId::new(4).unwrap());
        let page = |begin: u64, end: u64| Page {
            source: RegionKey(0),
            source_offset: 0,
            destination: RegionKey(1),
            destination_offset: begin,
            length: end - begin,
        };
        let mut ledger = Ledger::default();
        for (part, begin) in [(1, 0), (2, 10), (3, 20)] {
            assert_eq!(ledger.claim(part, lane, &page(begin, begin + 10), true), Ok(()));
        }
        assert_eq!(ledger.claim(4, other, &page(5, 15), true), Err(10..15));
        ledger.landed(1, &page(0, 10));
        ledger.landed(2, &page(10, 20));
        assert_eq!(ledger.claim(4, other, &page(5, 15), false), Err(10..15));
        assert_eq!(ledger.claim(4, other, &page(5, 15), true), Ok(()));
        ledger.landed(3, &page(20, 30));
        assert_eq!(ledger.credited(lane), [(RegionKey(1), 20..30)]);
    }
}
