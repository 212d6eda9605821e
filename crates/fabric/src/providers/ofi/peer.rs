//! Peer: endpoints, regions, and the bound on unconsumed arrivals.

use super::super::control_lanes::ControlLanes;
use super::super::granted_regions::{GrantEntry, GrantedRegions, RemoteMemory};
use super::super::presence::PeerState;
use super::sys;
use super::wire::{OfiAddress, OfiIntroduction};
use crate::lane_table::LaneTable;
use crate::parts::PartRule;
use crate::types::{Lane, RegionKey};
use crate::unconsumed::{ConsumedArrivals, SentArrivals};
use weft_control::Rank;

pub struct OfiPeer {
    pub rank: Rank,
    pub state: PeerState,
    /// Endpoint and signal target, for each NIC that both have.
    pub endpoints: Vec<(sys::Address, RemoteMemory)>,
    /// The peer's control lanes, which this link raises.
    pub remote: OfiIntroduction,
    /// Our control lanes, which it raises.
    pub local: ControlLanes,
    pub outgoing: SentArrivals,
    pub incoming: ConsumedArrivals,
    /// Unsent consumption reports.
    pub reports_due: u32,
    /// Parts in flight.
    pub parts: u32,
    /// Bulk parts in flight.
    pub bulk: u32,
    /// Control messages in flight.
    pub control: u32,
    /// Tokens for parts that failed or were posted after the peer was lost.
    pub parked: Vec<u64>,
    imported: GrantedRegions,
    /// NIC for the next part.
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
            imported: GrantedRegions::default(),
            next: 0,
        }
    }

    /// True if the peer's queue has room for one more arrival.
    #[inline(always)]
    pub fn may_send(&mut self, lanes: &LaneTable) -> bool {
        let consumed = self.local.consumed.id();
        self.outgoing.may_send(1, || lanes.value(consumed))
    }

    /// True once the peer's greeting has arrived.
    pub fn has_greeted(&self, lanes: &LaneTable) -> bool {
        self.presence(lanes) >= 1
    }

    /// True once both greetings have arrived.
    pub fn is_connected(&self, lanes: &LaneTable) -> bool {
        self.presence(lanes) >= 2
    }

    /// True once the peer's farewell has arrived.
    pub fn is_leaving(&self, lanes: &LaneTable) -> bool {
        self.presence(lanes) >= 3
    }

    fn presence(&self, lanes: &LaneTable) -> u64 {
        lanes.value(self.local.presence.id())
    }

    /// True for a control lane on the peer's link.
    #[inline]
    pub fn is_report(&self, lane: Lane) -> bool {
        self.local.contains(lane)
    }

    /// NIC for the next part: round-robin, so that stripes spread.
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
        self.imported.import(key, entry, self.endpoints.len())
    }

    pub fn remove_remote(&mut self, key: RegionKey) {
        self.imported.remove(key);
    }

    /// Address through one NIC for a slice in a region; `None` outside the grant.
    #[inline(always)]
    pub fn destination(
        &mut self,
        rail: usize,
        key: RegionKey,
        offset: u64,
        length: u64,
    ) -> Option<sys::RmaRange> {
        let RemoteMemory { base, key } = self.imported.destination(rail, key, offset, length)?;
        Some(sys::RmaRange { addr: base, len: length as usize, key })
    }

    /// Reason why [`OfiPeer::destination`] is `None`.
    #[cold]
    pub fn refusal(&mut self, key: RegionKey, offset: u64, length: u64) -> String {
        self.imported.refusal(key, offset, length)
    }
}

/// Rule and bound on unconsumed arrivals that two ends derive.
pub fn negotiate(here: &OfiAddress, there: &OfiAddress) -> (PartRule, u32) {
    (here.rule(there), here.max_unconsumed.min(there.max_unconsumed))
}
