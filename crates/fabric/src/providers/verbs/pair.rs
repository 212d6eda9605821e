//! Pair: the queue pair toward one peer on one NIC, with all work requests in flight.
//!
//! A reliable connection completes in order, so requests in flight are a queue: each chain asks for one
//! completion, on the last request.

use super::chains::{Chain, ChainUse, Chains};
use super::config::VerbsConfig;
use super::names::LaneNames;
use super::nic::Nic;
use super::objects::{ProtectionDomain, QueuePair, Queues, Result};
use super::sys;
use super::wire::{PairAddress, PortAddress};
use std::sync::Arc;
use weft_control::Rank;

/// Requests reserved for control messages: three consumption reports, two greetings, a farewell.
pub const CONTROL_REQUESTS: u32 = 6;
/// Data that a device may be asked to copy into a work request.
const MAX_INLINE: u32 = 64;
/// Retries for a packet without an acknowledgement, and for one whose receiver is not ready: 7 is without
/// limit for the latter.
const RETRIES: u8 = 7;
/// Pause before a write to a receiver that is not ready is retried, as libibverbs numbers it: 0.64 ms.
const NOT_READY_PAUSE: u8 = 12;

/// Queue pair toward one peer.
pub struct Pair {
    queue_pair: QueuePair,
    /// NIC index at this end, and at the peer's.
    pub rail: usize,
    pub remote_rail: usize,
    /// Lane names for parts that left and arrived.
    pub sent: LaneNames,
    pub received: LaneNames,
    /// Identifies this pair's completions: the peer, and how often it was reset.
    id: RequestId,
    in_flight: Chains,
    /// Work requests that the send queue has room for.
    free: u32,
    capacity: u32,
    /// Data that it copies into a work request.
    max_inline: u32,
    first_packet: u32,
}

/// Identifies a completion: the queue pair's peer, and how often that pair was reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId {
    pub peer: Rank,
    resets: u32,
}

impl RequestId {
    /// Identifies receives, which all peers share.
    pub const RECEIVE: u64 = u64::MAX;

    #[inline(always)]
    fn encode(self) -> u64 {
        u64::from(self.peer.0) | u64::from(self.resets) << 32
    }

    #[inline(always)]
    pub fn decode(id: u64) -> RequestId {
        RequestId { peer: Rank(id as u32), resets: (id >> 32) as u32 }
    }
}

/// The way from a port to a peer's.
#[derive(Clone, Copy)]
pub struct Path<'a> {
    pub nic: &'a Nic,
    pub config: &'a VerbsConfig,
    pub port: PortAddress,
    pub pair: PairAddress,
}

impl Pair {
    /// Opens a queue pair for `requests` part work requests between these NICs at the two ends.
    /// `first_packet`: random, so that packets from an earlier queue pair with this number are rejected.
    pub fn open(
        domain: &Arc<ProtectionDomain>,
        queues: &Arc<Queues>,
        peer: Rank,
        requests: u32,
        (rail, remote_rail): (usize, usize),
        first_packet: u32,
    ) -> Result<Pair> {
        let capacity = requests + CONTROL_REQUESTS;
        let open = |inline| QueuePair::new(domain, queues, capacity, 1, inline);
        let (queue_pair, max_inline) = open(MAX_INLINE).or_else(|_| open(0))?;
        Ok(Pair {
            queue_pair,
            rail,
            remote_rail,
            sent: LaneNames::new(),
            received: LaneNames::new(),
            id: RequestId { peer, resets: 0 },
            in_flight: Chains::new(capacity),
            free: capacity,
            capacity,
            max_inline,
            first_packet,
        })
    }

    pub fn address(&self) -> PairAddress {
        PairAddress { number: self.queue_pair.number(), first_packet: self.first_packet }
    }

    /// Connects it: INIT, RTR, RTS. `exchanged`: packets that both ends have received on it before a reset.
    pub fn connect(&self, path: &Path<'_>, exchanged: u32) -> Result<()> {
        let Path { nic, config, port, pair } = *path;
        let mut attributes = sys::QpAttr {
            qp_state: sys::IBV_QPS_INIT,
            port_num: nic.port,
            qp_access_flags: sys::IBV_ACCESS_REMOTE_WRITE,
            ..sys::QpAttr::default()
        };
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_PKEY_INDEX
            | sys::IBV_QP_PORT
            | sys::IBV_QP_ACCESS_FLAGS;
        self.queue_pair.modify(&mut attributes, mask)?;
        let mut attributes = sys::QpAttr {
            qp_state: sys::IBV_QPS_RTR,
            path_mtu: nic.attributes.active_mtu.min(port.mtu.into()),
            dest_qp_num: pair.number,
            rq_psn: packet(pair.first_packet, exchanged),
            max_dest_rd_atomic: 1,
            min_rnr_timer: NOT_READY_PAUSE,
            ah_attr: route(nic, config, &port),
            ..sys::QpAttr::default()
        };
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC
            | sys::IBV_QP_MIN_RNR_TIMER;
        self.queue_pair.modify(&mut attributes, mask)?;
        let mut attributes = sys::QpAttr {
            qp_state: sys::IBV_QPS_RTS,
            sq_psn: packet(self.first_packet, exchanged),
            timeout: config.ack_timeout,
            retry_cnt: RETRIES,
            rnr_retry: RETRIES,
            max_rd_atomic: 1,
            ..sys::QpAttr::default()
        };
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_SQ_PSN
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.queue_pair.modify(&mut attributes, mask)
    }

    /// Discards all requests in flight, and ends the connection until [`Pair::connect`].
    pub fn reset(&mut self) -> Result<()> {
        let mut attributes = sys::QpAttr { qp_state: sys::IBV_QPS_RESET, ..sys::QpAttr::default() };
        self.queue_pair.modify(&mut attributes, sys::IBV_QP_STATE)?;
        self.in_flight.clear();
        self.free = self.capacity;
        self.id.resets += 1;
        Ok(())
    }

    /// True if a part with `requests` work requests has room.
    #[inline(always)]
    pub fn has_room(&self, requests: u32) -> bool {
        self.free >= requests + CONTROL_REQUESTS
    }

    /// Data that it copies into a work request.
    #[inline(always)]
    pub fn max_inline(&self) -> u32 {
        self.max_inline
    }

    #[inline(always)]
    pub fn request_id(&self) -> u64 {
        self.id.encode()
    }

    /// Posts a chain with `length` work requests, for which it has room.
    ///
    /// # Errors
    /// Error number from the post. Some requests in the chain may have been posted: the pair accepts no
    /// further chain then.
    ///
    /// # Safety
    /// The chain ends after `length` requests, and only the last one asks for a completion. The ranges
    /// are registered and valid until it has completed or this pair is dropped.
    #[inline(always)]
    pub unsafe fn post(
        &mut self,
        first: *mut sys::SendRequest,
        length: u32,
        chain_use: ChainUse,
    ) -> Result<(), i32> {
        debug_assert!(self.free >= length, "room was checked");
        // SAFETY: by the caller's contract.
        unsafe { self.queue_pair.post(first) }?;
        self.free -= length;
        self.in_flight.push(Chain { chain_use, length });
        Ok(())
    }

    /// Use for the oldest chain in flight, which has completed; `None` for a completion from before the
    /// last reset.
    #[inline(always)]
    pub fn completed(&mut self, id: RequestId) -> Option<ChainUse> {
        if id != self.id {
            return None;
        }
        let Chain { chain_use, length } = self.in_flight.pop()?;
        self.free += length;
        Some(chain_use)
    }

    /// Oldest chain in flight: the one that a first error concerns.
    pub fn oldest(&self) -> Option<Chain> {
        self.in_flight.oldest()
    }

    pub fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Uses for all chains in flight, oldest first, which no longer complete one by one.
    pub fn abandon(&mut self) -> impl Iterator<Item = ChainUse> {
        std::iter::from_fn(|| self.in_flight.pop()).map(|chain| chain.chain_use)
    }

    /// True for a completion since the last reset.
    pub fn is_current(&self, id: RequestId) -> bool {
        id == self.id
    }
}

/// Sequence number for a packet `count` behind another; these have 24 bits.
fn packet(first: u32, count: u32) -> u32 {
    first.wrapping_add(count) & 0xff_ffff
}

/// Address for a peer's port: by GID, or by LID within one InfiniBand subnet.
fn route(nic: &Nic, config: &VerbsConfig, port: &PortAddress) -> sys::AhAttr {
    let same_subnet = nic.gid.gid.0[..8] == port.gid.0[..8];
    let is_global = nic.is_ethernet() || port.lid == 0 || !same_subnet;
    sys::AhAttr {
        grh: sys::GlobalRoute {
            dgid: port.gid,
            flow_label: 0,
            sgid_index: nic.gid.gid_index as u8,
            hop_limit: 64,
            traffic_class: config.traffic_class,
        },
        dlid: port.lid,
        sl: config.service_level,
        is_global: is_global.into(),
        port_num: nic.port,
        ..sys::AhAttr::default()
    }
}
