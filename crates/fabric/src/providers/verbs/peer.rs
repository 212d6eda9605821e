//! Peer: queue pairs, regions, and the bound on unconsumed arrivals.

use super::super::control_lanes::ControlLanes;
use super::super::granted_regions::GrantedRegions;
use super::super::presence::PeerState;
use super::pair::Pair;
use super::wire::{PairAddress, PortAddress};
use crate::lane_table::LaneTable;
use crate::unconsumed::{ConsumedArrivals, SentArrivals};
use weft_control::Rank;

/// Bulk parts in flight toward one peer, behind which a latency-critical part may wait.
const MAX_BULK: u32 = 16;

pub struct VerbsPeer {
    pub rank: Rank,
    pub state: PeerState,
    /// True for a rank lower than this link's.
    greets_first: bool,
    /// Queue pairs toward it, one for each network that both have.
    pub pairs: Vec<Pair>,
    /// The peer's pair ends; empty before it is connected.
    pub ends: Vec<(PortAddress, PairAddress)>,
    /// The peer's lanes for consumption reports and for greetings, once connected.
    pub remote: Option<ControlLanes>,
    /// Our control lanes, which it raises.
    pub local: ControlLanes,
    pub outgoing: SentArrivals,
    pub incoming: ConsumedArrivals,
    /// Unsent consumption reports.
    pub reports_due: u32,
    /// Bulk parts in flight.
    pub bulk: u32,
    /// Tokens for parts that failed or were posted after the peer was lost.
    pub parked: Vec<u64>,
    pub granted: GrantedRegions,
    /// Pair index for the next part.
    next: usize,
}

impl VerbsPeer {
    /// `own`: this link's rank.
    pub fn new(
        (own, rank): (Rank, Rank),
        local: ControlLanes,
        max_unconsumed: u32,
        pairs: Vec<Pair>,
    ) -> VerbsPeer {
        VerbsPeer {
            rank,
            state: PeerState::Open,
            greets_first: rank < own,
            pairs,
            ends: Vec::new(),
            remote: None,
            local,
            outgoing: SentArrivals::new(max_unconsumed),
            incoming: ConsumedArrivals::new(max_unconsumed),
            reports_due: 0,
            bulk: 0,
            parked: Vec::new(),
            granted: GrantedRegions::default(),
            next: 0,
        }
    }

    /// True while parts or control messages toward it are in flight.
    pub fn has_in_flight(&self) -> bool {
        self.pairs.iter().any(Pair::has_in_flight)
    }

    /// True if the peer's queue has room for `count` more arrivals, 1 or 2.
    #[inline(always)]
    pub fn may_send(&mut self, count: u32, lanes: &LaneTable) -> bool {
        let consumed = self.local.consumed.id();
        self.outgoing.may_send(count, || lanes.value(consumed))
    }

    /// True if the peer's queue has room for `count` more arrivals, 1 or 2, and bulk parts do not exceed
    /// the limit.
    #[inline(always)]
    pub fn may_post(&mut self, count: u32, is_bulk: bool, lanes: &LaneTable) -> bool {
        self.may_send(count, lanes) && (!is_bulk || self.bulk < MAX_BULK)
    }

    /// Counts a posted part and the arrivals it makes.
    #[inline(always)]
    pub fn posted(&mut self, arrivals: u32, is_bulk: bool) {
        self.outgoing.send(arrivals);
        self.bulk += u32::from(is_bulk);
    }

    /// True once the peer's greeting has arrived.
    pub fn has_greeted(&self, lanes: &LaneTable) -> bool {
        lanes.value(self.local.presence.id()) >= 1
    }

    /// True once the peer's greetings have arrived: two from a peer that greets first, where the second
    /// confirms our answer; one from any other peer, the answer.
    pub fn is_connected(&self, lanes: &LaneTable) -> bool {
        lanes.value(self.local.presence.id()) >= self.greetings()
    }

    /// True once the peer's farewell has arrived.
    pub fn is_leaving(&self, lanes: &LaneTable) -> bool {
        lanes.value(self.local.presence.id()) > self.greetings()
    }

    fn greetings(&self) -> u64 {
        if self.greets_first { 2 } else { 1 }
    }

    /// Pair index for the next part: round-robin, so that stripes spread.
    #[inline(always)]
    pub fn next_pair(&mut self) -> usize {
        let pair = self.next;
        if self.pairs.len() > 1 {
            self.next = (pair + 1) % self.pairs.len();
        }
        pair
    }

    /// The pair that [`VerbsPeer::next_pair`] will return, and the regions that it writes to.
    #[inline(always)]
    pub fn coming_pair(&mut self) -> Option<(&mut Pair, &mut GrantedRegions)> {
        Some((self.pairs.get_mut(self.next)?, &mut self.granted))
    }

    /// The peer's pair on one NIC at this end.
    #[inline(always)]
    pub fn pair_on(&mut self, rail: usize) -> Option<&mut Pair> {
        self.pairs.iter_mut().find(|pair| pair.rail == rail)
    }
}
