//! Peer: its endpoints and regions, and its bound on unconsumed arrivals.

use super::sys;
use super::wire::{GrantEntry, OfiAddress, OfiIntroduction, RemoteMemory};
use crate::lane_table::LaneTable;
use crate::parts::PartRule;
use crate::types::{Lane, RegionKey};
use crate::unconsumed::{ConsumedArrivals, SentArrivals};
use weft_control::Rank;

/// Local lanes that a peer's link raises for control messages.
#[derive(Clone, Copy, Debug)]
pub struct ControlLanes {
    /// Raised for each half of the bound on unconsumed arrivals that the peer has consumed.
    pub consumed: Lane,
    /// Raised with the peer's greeting, on its receipt of ours, and when it leaves.
    pub presence: Lane,
}

impl ControlLanes {
    /// Issues two adjacent lanes of this engine's table.
    pub fn issue(lanes: &LaneTable, peer: Rank) -> crate::Result<ControlLanes> {
        let consumed = lanes.issue(peer, 2)?;
        let beside = crate::LaneId::new(consumed.id().get() + 1);
        let beside = beside.expect("two adjacent lanes were issued");
        Ok(ControlLanes { consumed, presence: Lane::new(beside, consumed.generation()) })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerState {
    Open,
    /// Reported as lost. Parts toward it wait for the fence.
    Lost,
    Fenced,
}

pub struct OfiPeer {
    pub rank: Rank,
    pub state: PeerState,
    /// Its endpoint and signal target, for each NIC that both have.
    pub endpoints: Vec<(sys::Address, RemoteMemory)>,
    /// Its control lanes, which this link raises.
    pub remote: OfiIntroduction,
    /// Our control lanes, which it raises.
    pub local: ControlLanes,
    pub outgoing: SentArrivals,
    pub incoming: ConsumedArrivals,
    /// Unsent reports of consumption.
    pub reports_due: u32,
    /// Parts in flight.
    pub parts: u32,
    /// Bulk parts in flight.
    pub bulk: u32,
    /// Control messages in flight.
    pub control: u32,
    /// Tokens of parts that failed or were posted after its loss.
    pub parked: Vec<u64>,
    imported: Vec<(RegionKey, GrantEntry)>,
    /// Index of the last region found.
    recent: usize,
    /// NIC of the next part.
    next: usize,
}

impl OfiPeer {
    pub fn new(
        rank: Rank,
        local: ControlLanes,
        remote: OfiIntroduction,
        max_unconsumed: u32,
        endpoints: Vec<(sys::Address, RemoteMemory)>,
    ) -> OfiPeer {
        OfiPeer {
            rank,
            state: PeerState::Open,
            endpoints,
            remote,
            local,
            outgoing: SentArrivals::new(max_unconsumed),
            incoming: ConsumedArrivals::new(max_unconsumed),
            reports_due: 0,
            parts: 0,
            bulk: 0,
            control: 0,
            parked: Vec::new(),
            imported: Vec::new(),
            recent: 0,
            next: 0,
        }
    }

    /// True if its queue has room for one more arrival.
    #[inline(always)]
    pub fn may_send(&mut self, lanes: &LaneTable) -> bool {
        let consumed = self.local.consumed.id();
        self.outgoing.may_send(|| lanes.value(consumed))
    }

    /// True once its greeting has arrived.
    pub fn has_greeted(&self, lanes: &LaneTable) -> bool {
        self.presence(lanes) >= 1
    }

    /// True once both greetings have arrived.
    pub fn is_connected(&self, lanes: &LaneTable) -> bool {
        self.presence(lanes) >= 2
    }

    /// True once its farewell has arrived.
    pub fn is_leaving(&self, lanes: &LaneTable) -> bool {
        self.presence(lanes) >= 3
    }

    fn presence(&self, lanes: &LaneTable) -> u64 {
        lanes.value(self.local.presence.id())
    }

    /// True for a control lane of its link.
    #[inline]
    pub fn is_report(&self, lane: Lane) -> bool {
        lane.id().get() & !1 == self.local.consumed.id().get()
    }

    /// NIC of the next part: round-robin, so that stripes spread.
    #[inline]
    pub fn next_rail(&mut self) -> usize {
        if self.endpoints.len() == 1 {
            return 0;
        }
        let rail = self.next;
        self.next = (rail + 1) % self.endpoints.len();
        rail
    }

    /// Stores a region's grant; `None` if it lacks a NIC.
    pub fn import(&mut self, key: RegionKey, entry: GrantEntry) -> Option<()> {
        if entry.targets.len() < self.endpoints.len() {
            return None;
        }
        match self.imported.binary_search_by_key(&key, |(key, _)| *key) {
            Ok(place) => self.imported[place].1 = entry,
            Err(place) => self.imported.insert(place, (key, entry)),
        }
        Some(())
    }

    pub fn remove_remote(&mut self, key: RegionKey) {
        self.imported.retain(|(known, _)| *known != key);
    }

    /// Address of a slice of a region through one NIC; `None` outside of the grant.
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
        let RemoteMemory { base, key } = *entry.targets.get(rail)?;
        Some(sys::RmaRange { addr: base.wrapping_add(offset), len: length as usize, key })
    }

    #[inline(never)]
    fn find(&mut self, key: RegionKey) -> Option<&GrantEntry> {
        self.recent = self.imported.binary_search_by_key(&key, |(key, _)| *key).ok()?;
        Some(&self.imported[self.recent].1)
    }

    /// Reason why [`OfiPeer::destination`] is `None`.
    #[cold]
    pub fn refusal(&mut self, key: RegionKey, offset: u64, length: u64) -> String {
        let Some(&GrantEntry { begin, end, .. }) = self.find(key) else {
            return format!("region {} was not granted", key.0);
        };
        let key = key.0;
        format!(
            "bytes {offset} to {offset}+{length} of region {key}: outside of the grant, {begin} to {end}"
        )
    }
}

/// Rule and bound on unconsumed arrivals that two ends derive.
pub fn negotiate(here: &OfiAddress, there: &OfiAddress) -> (PartRule, u32) {
    (here.rule(there), here.max_unconsumed.min(there.max_unconsumed))
}
