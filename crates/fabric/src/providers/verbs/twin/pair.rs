//! Twin queue pair: states, packet numbers, send queue slots.

use super::super::sys;
use super::faults::TwinFault;
use super::statistics::TwinChains;
use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};
use std::time::{Duration, Instant};

/// State after an error; the others have names in `sys.rs`.
pub const ERROR: c_uint = 6;
/// Packet numbers have 24 bits.
const PACKETS: u32 = 1 << 24;

pub struct TwinPair {
    pub context: u32,
    pub domain: u32,
    pub send_queue: u32,
    pub receive_queue: u32,
    pub receives: u32,
    /// Handle address, for asynchronous events.
    pub handle: usize,
    pub state: c_uint,
    pub port: u8,
    pub access: c_uint,
    /// Queue pair at the other end, and the way to it.
    pub remote: u32,
    pub route: sys::AhAttr,
    mtu: u32,
    next_sent: u32,
    expected: u32,
    pub capacity: u64,
    pub max_ranges: c_int,
    pub max_inline: u64,
    /// Requests that have not been executed.
    pub queue: VecDeque<Request>,
    /// Requests posted so far, and those whose slots are free again.
    pub posted: u64,
    pub reclaimed: u64,
    pub chains: TwinChains,
    /// Exponent for the time before a lost packet is repeated; 0: never.
    timeout: u8,
    retry_limit: u8,
    retries: u8,
    pub retry_at: Option<Instant>,
}

/// Work request.
pub struct Request {
    pub wr_id: u64,
    /// Position in post order.
    pub index: u64,
    pub is_signalled: bool,
    /// Big-endian immediate.
    pub immediate: Option<u32>,
    pub remote_address: u64,
    pub key: u32,
    pub length: u64,
    pub source: Source,
    pub fault: Option<TwinFault>,
}

/// Work request bytes.
pub enum Source {
    Ranges(Vec<sys::Sge>),
    Inline(Vec<u8>),
}

/// Position of a packet number in the receiver's sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sequence {
    Expected,
    /// Acknowledged without effect.
    Duplicate,
    /// Not acknowledged.
    Ahead,
}

impl TwinPair {
    pub fn new(context: u32, domain: u32, queues: [u32; 3], cap: &sys::QpCapacity) -> TwinPair {
        let [send_queue, receive_queue, receives] = queues;
        TwinPair {
            context,
            domain,
            send_queue,
            receive_queue,
            receives,
            handle: 0,
            state: sys::IBV_QPS_RESET,
            port: 0,
            access: 0,
            remote: 0,
            route: sys::AhAttr::default(),
            mtu: 1024,
            next_sent: 0,
            expected: 0,
            capacity: cap.max_send_wr.into(),
            max_ranges: cap.max_send_sge as c_int,
            max_inline: cap.max_inline_data.into(),
            queue: VecDeque::new(),
            posted: 0,
            reclaimed: 0,
            chains: TwinChains::default(),
            timeout: 0,
            retry_limit: 0,
            retries: 0,
            retry_at: None,
        }
    }

    /// Changes the state. An error number for a transition that the specification lacks, or one without
    /// the required attributes.
    pub fn modify(&mut self, attributes: &sys::QpAttr, mask: c_uint) -> c_int {
        let transition = (self.state, attributes.qp_state);
        let required = match transition {
            (_, sys::IBV_QPS_RESET) => 0,
            (sys::IBV_QPS_RESET | sys::IBV_QPS_INIT, sys::IBV_QPS_INIT) => {
                sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS
            }
            (sys::IBV_QPS_INIT, sys::IBV_QPS_RTR) => {
                sys::IBV_QP_AV
                    | sys::IBV_QP_PATH_MTU
                    | sys::IBV_QP_DEST_QPN
                    | sys::IBV_QP_RQ_PSN
                    | sys::IBV_QP_MAX_DEST_RD_ATOMIC
                    | sys::IBV_QP_MIN_RNR_TIMER
            }
            (sys::IBV_QPS_RTR, sys::IBV_QPS_RTS) => {
                sys::IBV_QP_TIMEOUT
                    | sys::IBV_QP_RETRY_CNT
                    | sys::IBV_QP_RNR_RETRY
                    | sys::IBV_QP_SQ_PSN
                    | sys::IBV_QP_MAX_QP_RD_ATOMIC
            }
            _ => return libc::EINVAL,
        };
        if mask != required | sys::IBV_QP_STATE {
            return libc::EINVAL;
        }
        match attributes.qp_state {
            sys::IBV_QPS_RESET => {
                self.queue.clear();
                self.reclaimed = self.posted;
                (self.retries, self.retry_at) = (0, None);
            }
            sys::IBV_QPS_INIT => {
                (self.port, self.access) = (attributes.port_num, attributes.qp_access_flags);
            }
            sys::IBV_QPS_RTR => {
                self.mtu = 128 << attributes.path_mtu;
                (self.remote, self.route) = (attributes.dest_qp_num, attributes.ah_attr);
                self.expected = attributes.rq_psn % PACKETS;
            }
            _ => {
                self.next_sent = attributes.sq_psn % PACKETS;
                (self.timeout, self.retry_limit) = (attributes.timeout, attributes.retry_cnt);
            }
        }
        self.state = attributes.qp_state;
        0
    }

    pub fn is_receiving(&self) -> bool {
        matches!(self.state, sys::IBV_QPS_RTR | sys::IBV_QPS_RTS)
    }

    /// Packets in a write.
    fn packets(&self, length: u64) -> u32 {
        length.div_ceil(self.mtu.into()).max(1) as u32
    }

    pub fn next_packet(&self) -> u32 {
        self.next_sent
    }

    pub fn sequence(&self, packet: u32) -> Sequence {
        match packet.wrapping_sub(self.expected) % PACKETS {
            0 => Sequence::Expected,
            ahead if ahead < PACKETS / 2 => Sequence::Ahead,
            _ => Sequence::Duplicate,
        }
    }

    /// Counts the packets in a received write.
    pub fn accept(&mut self, length: u64) {
        self.expected = (self.expected + self.packets(length)) % PACKETS;
    }

    /// Counts the packets in an acknowledged write.
    pub fn acknowledged(&mut self, length: u64) {
        self.next_sent = (self.next_sent + self.packets(length)) % PACKETS;
        (self.retries, self.retry_at) = (0, None);
    }

    /// Counts a packet without acknowledgement; false after the last permitted retry.
    pub fn lose_packet(&mut self, now: Instant) -> bool {
        if self.retries > self.retry_limit {
            return false;
        }
        self.retries += 1;
        let timeout = Duration::from_nanos(4096 << self.timeout);
        self.retry_at = (self.timeout > 0).then_some(now + timeout);
        true
    }
}
