//! Peer: where its endpoints and regions are, and how much it has of ours unconsumed.

use super::sys;
use super::wire::{Address, Entry, Introduction, Target};
use crate::lane_table::LaneTable;
use crate::parts::PartRule;
use crate::types::{Lane, RegionKey};
use crate::unconsumed::{Incoming, Outgoing};
use weft_control::Rank;

/// Lanes of ours by which a peer's link reports to this one.
#[derive(Clone, Copy, Debug)]
pub struct Reports {
    /// Raised for each half of the agreed number of arrivals that the peer has consumed.
    pub consumed: Lane,
    /// Raised when the peer greets, when it has our greeting, and when it leaves.
    pub presence: Lane,
}

impl Reports {
    /// Two lanes of this engine's table.
    pub fn issue(lanes: &LaneTable, peer: Rank) -> crate::Result<Reports> {
        let consumed = lanes.issue(peer, 2)?;
        let beside = crate::LaneId::new(consumed.id().get() + 1);
        let beside = beside.expect("two lanes in a row were issued");
        Ok(Reports { consumed, presence: Lane::new(beside, consumed.generation()) })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    Open,
    /// Reported as lost. Parts toward it wait for its fence.
    Lost,
    Fenced,
}

pub struct Peer {
    pub rank: Rank,
    pub state: State,
    /// Its endpoint and the target of its signals, for each NIC that both have.
    pub ends: Vec<(sys::Address, Target)>,
    /// Its lanes that this link raises.
    pub theirs: Introduction,
    /// Our lanes that it raises.
    pub ours: Reports,
    pub outgoing: Outgoing,
    pub incoming: Incoming,
    /// Reports of consumption that are due and have not left.
    pub due: u32,
    /// Parts under way.
    pub parts: u32,
    /// Those of them that are bulk.
    pub bulk: u32,
    /// Messages of the link's own under way.
    pub own: u32,
    /// Tokens of parts that failed, or were posted, after it was lost.
    pub stuck: Vec<u64>,
    imported: Vec<(RegionKey, Entry)>,
    /// Place of the region that was asked for last.
    recent: usize,
    /// The NIC that takes the next part.
    next: usize,
}

impl Peer {
    pub fn new(
        rank: Rank,
        ours: Reports,
        theirs: Introduction,
        max_unconsumed: u32,
        ends: Vec<(sys::Address, Target)>,
    ) -> Peer {
        Peer {
            rank,
            state: State::Open,
            ends,
            theirs,
            ours,
            outgoing: Outgoing::new(max_unconsumed),
            incoming: Incoming::new(max_unconsumed),
            due: 0,
            parts: 0,
            bulk: 0,
            own: 0,
            stuck: Vec::new(),
            imported: Vec::new(),
            recent: 0,
            next: 0,
        }
    }

    /// Whether its queue has a place for one more arrival.
    #[inline(always)]
    pub fn may_send(&mut self, lanes: &LaneTable) -> bool {
        let consumed = self.ours.consumed.id();
        self.outgoing.may_send(|| lanes.value(consumed))
    }

    /// Whether it has greeted.
    pub fn has_greeted(&self, lanes: &LaneTable) -> bool {
        self.presence(lanes) >= 1
    }

    /// Whether it has our greeting, and we have its.
    pub fn is_connected(&self, lanes: &LaneTable) -> bool {
        self.presence(lanes) >= 2
    }

    /// Whether its farewell has arrived.
    pub fn is_leaving(&self, lanes: &LaneTable) -> bool {
        self.presence(lanes) >= 3
    }

    fn presence(&self, lanes: &LaneTable) -> u64 {
        lanes.value(self.ours.presence.id())
    }

    /// Whether an arrival on this lane is a report of its link.
    #[inline]
    pub fn is_report(&self, lane: Lane) -> bool {
        lane.id().get() & !1 == self.ours.consumed.id().get()
    }

    /// The NIC for the next part: in turn, so that stripes spread.
    #[inline]
    pub fn next_rail(&mut self) -> usize {
        if self.ends.len() == 1 {
            return 0;
        }
        let rail = self.next;
        self.next = (rail + 1) % self.ends.len();
        rail
    }

    /// Takes in a region's entry. `None` if it lacks a NIC.
    pub fn import(&mut self, key: RegionKey, entry: Entry) -> Option<()> {
        if entry.targets.len() < self.ends.len() {
            return None;
        }
        match self.imported.binary_search_by_key(&key, |(key, _)| *key) {
            Ok(place) => self.imported[place].1 = entry,
            Err(place) => self.imported.insert(place, (key, entry)),
        }
        Some(())
    }

    pub fn forget(&mut self, key: RegionKey) {
        self.imported.retain(|(known, _)| *known != key);
    }

    /// Where a slice of a region is, as one NIC names it. `None` if it was not granted.
    #[inline(always)]
    pub fn destination(
        &mut self,
        rail: usize,
        key: RegionKey,
        offset: u64,
        length: u64,
    ) -> Option<sys::RmaRange> {
        let entry = match self.imported.get(self.recent) {
            Some((recent, entry)) if *recent == key => entry,
            _ => self.find(key)?,
        };
        if offset < entry.begin || offset.checked_add(length)? > entry.end {
            return None;
        }
        let Target { base, key } = *entry.targets.get(rail)?;
        Some(sys::RmaRange { addr: base.wrapping_add(offset), len: length as usize, key })
    }

    #[inline(never)]
    fn find(&mut self, key: RegionKey) -> Option<&Entry> {
        self.recent = self.imported.binary_search_by_key(&key, |(key, _)| *key).ok()?;
        Some(&self.imported[self.recent].1)
    }

    /// Why there is no [`Peer::destination`].
    #[cold]
    pub fn refused(&mut self, key: RegionKey, offset: u64, length: u64) -> String {
        let Some(&Entry { begin, end, .. }) = self.find(key) else {
            return format!("region {} was not granted", key.0);
        };
        let key = key.0;
        format!("bytes {offset} to {offset}+{length} of region {key}: granted are {begin} to {end}")
    }
}

/// What two ends have agreed on.
pub fn agreed(here: &Address, there: &Address) -> (PartRule, u32) {
    (here.rule(there), here.max_unconsumed.min(there.max_unconsumed))
}
