//! Peer: its queue pairs and regions, and its bound on unconsumed arrivals.

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
    /// True for a lower rank than that of this link.
    greets_first: bool,
    /// Queue pairs toward it, one for each network that both have.
    pub pairs: Vec<Pair>,
    /// Its ends of the pairs; empty before it is connected.
    pub ends: Vec<(PortAddress, PairAddress)>,
    /// Its lanes for reports of consumption and for greetings, once connected.
    pub remote: Option<ControlLanes>,
    /// Our control lanes, which it raises.
    pub local: ControlLanes,
    pub outgoing: SentArrivals,
    pub incoming: ConsumedArrivals,
    /// Unsent reports of consumption.
    pub reports_due: u32,
    /// Bulk parts in flight.
    pub bulk: u32,
    /// Tokens of parts that failed or were posted after its loss.
    pub parked: Vec<u64>,
    pub granted: GrantedRegions,
    /// Index of the pair of the next part.
    next: usize,
}

impl VerbsPeer {
    /// `own`: the rank of this link.
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

    /// True if its queue has room for `count` more arrivals, 1 or 2.
    #[inline(always)]
    pub fn may_send(&mut self, count: u32, lanes: &LaneTable) -> bool {
        let consumed = self.local.consumed.id();
        self.outgoing.may_send(count, || lanes.value(consumed))
    }

    /// True if its queue has room for `count` more arrivals, 1 or 2, and bulk parts do not exceed their limit.
    #[inline(always)]
    pub fn may_post(&mut self, count: u32, is_bulk: bool, lanes: &LaneTable) -> bool {
        self.may_send(count, lanes) && (!is_bulk || self.bulk < MAX_BULK)
    }

    /// Counts a posted part, with its arrivals.
    #[inline(always)]
    pub fn posted(&mut self, arrivals: u32, is_bulk: bool) {
        self.outgoing.send(arrivals);
        self.bulk += u32::from(is_bulk);
    }

    /// True once its greeting has arrived.
    pub fn has_greeted(&self, lanes: &LaneTable) -> bool {
        lanes.value(self.local.presence.id()) >= 1
    }

    /// True once its greetings have arrived: of a peer that greets first two, the latter of which confirms our
    /// answer; of another one its answer.
    pub fn is_connected(&self, lanes: &LaneTable) -> bool {
        lanes.value(self.local.presence.id()) >= self.greetings()
    }

    /// True once its farewell has arrived.
    pub fn is_leaving(&self, lanes: &LaneTable) -> bool {
        lanes.value(self.local.presence.id()) > self.greetings()
    }

    fn greetings(&self) -> u64 {
        if self.greets_first { 2 } else { 1 }
    }

    /// Index of the pair for the next part: round-robin, so that stripes spread.
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

    /// Its pair on one NIC of this end.
    #[inline(always)]
    pub fn pair_on(&mut self, rail: usize) -> Option<&mut Pair> {
        self.pairs.iter_mut().find(|pair| pair.rail == rail)
    }
}
