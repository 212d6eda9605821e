//! Peer: endpoints, regions, and the bound on unconsumed arrivals.

use super::super::control_lanes::ControlLanes;
use super::super::granted_regions::{GrantEntry, GrantedRegions, RemoteMemory};
use super::super::presence::PeerState;
use super::sys;
use super::wire::{OfiAddress, OfiIntroduction};
use crate::lane_table::LaneTable;
use crate::link::PostStatus;
use crate::parts::PartRule;
use crate::types::{Lane, RegionKey};
use crate::unconsumed::{ConsumedArrivals, SentArrivals};
use weft_control::Rank;

/// Bulk parts in flight toward one peer, behind which a latency-critical part may wait.
const MAX_BULK: u32 = 16;

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
    /// By NIC.
    targets: Box<[WriteTarget]>,
    /// NIC for the next part.
    next: usize,
}

/// Prepared destination through one NIC: a write to the same region adds only an offset and a length.
#[derive(Clone, Copy)]
struct WriteTarget {
    address: sys::Address,
    region: RegionKey,
    granted: (u64, u64),
    memory: RemoteMemory,
}

impl WriteTarget {
    /// Target without a region, whose bounds no slice keeps.
    fn new(address: sys::Address) -> WriteTarget {
        let memory = RemoteMemory { base: 0, key: 0 };
        WriteTarget { address, region: RegionKey(u32::MAX), granted: (u64::MAX, 0), memory }
    }

    /// Address and range for a slice in the region; `None` outside the grant.
    #[inline(always)]
    fn slice(&self, offset: u64, length: u64) -> Option<(sys::Address, sys::RmaRange)> {
        let (begin, end) = self.granted;
        if offset < begin || offset.checked_add(length)? > end {
            return None;
        }
        let RemoteMemory { base, key } = self.memory;
        let (addr, len) = (base.wrapping_add(offset), length as usize);
        Some((self.address, sys::RmaRange { addr, len, key }))
    }
}

impl OfiPeer {
    pub fn new(
        rank: Rank,
        local: ControlLanes,
        remote: OfiIntroduction,
        max_unconsumed: u32,
        endpoints: Vec<(sys::Address, RemoteMemory)>,
    ) -> OfiPeer {
        let targets = endpoints.iter().map(|(address, _)| WriteTarget::new(*address)).collect();
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
            targets,
            next: 0,
        }
    }

    /// True if the peer's queue has room for one more arrival.
    #[inline(always)]
    fn may_send(&mut self, lanes: &LaneTable) -> bool {
        let consumed = self.local.consumed.id();
        self.outgoing.may_send(1, || lanes.value(consumed))
    }

    /// True if one more part may be in flight, out of `most`.
    #[inline(always)]
    pub fn may_post(&mut self, most: u32, is_bulk: bool, lanes: &LaneTable) -> bool {
        let has_room = self.parts < most && !(is_bulk && self.bulk >= MAX_BULK);
        self.may_send(lanes) && has_room
    }

    /// Counts an accepted part.
    #[inline(always)]
    pub fn posted(&mut self, status: PostStatus, is_bulk: bool) {
        self.outgoing.send(1);
        if status == PostStatus::InFlight {
            self.parts += 1;
            self.bulk += u32::from(is_bulk);
        }
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

    /// NIC for the next part, without taking it.
    #[inline(always)]
    pub fn coming_rail(&self) -> usize {
        self.next
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
        self.discard_targets();
        self.imported.import(key, entry, self.endpoints.len())
    }

    pub fn remove_remote(&mut self, key: RegionKey) {
        self.discard_targets();
        self.imported.remove(key);
    }

    fn discard_targets(&mut self) {
        self.targets.iter_mut().for_each(|it| *it = WriteTarget::new(it.address));
    }

    /// Address and range through one NIC for a slice in a region; `None` outside the grant.
    #[inline(always)]
    pub fn destination(
        &mut self,
        rail: usize,
        key: RegionKey,
        offset: u64,
        length: u64,
    ) -> Option<(sys::Address, sys::RmaRange)> {
        if self.targets[rail].region != key {
            self.prepare_target(rail, key)?;
        }
        self.targets[rail].slice(offset, length)
    }

    /// Makes a region the one whose writes through a NIC are prepared.
    #[inline(never)]
    fn prepare_target(&mut self, rail: usize, region: RegionKey) -> Option<()> {
        let (granted, memory) = self.imported.target(rail, region)?;
        let address = self.targets[rail].address;
        self.targets[rail] = WriteTarget { address, region, granted, memory };
        Some(())
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
