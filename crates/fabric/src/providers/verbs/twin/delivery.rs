//! A write's path from one queue pair to another.
//!
//! A chain is executed inside its post, as far as packets arrive: a write toward a queue pair that does
//! not receive yet, or with a packet number ahead of the expected one, is lost and repeated after the
//! sender's timeout; a write with an immediate waits while the owner has no receive posted. Time passes
//! at posts and polls.

use super::super::super::twin_gpus::{self, GpuId, WithheldWrite};
use super::super::sys;
use super::faults::TwinFault;
use super::network::Network;
use super::pair::{ERROR, Request, Sequence, Source, TwinPair};
use super::queues::Entry;
use std::ffi::c_uint;
use std::time::Instant;

/// Outcome of one write attempt.
enum Attempt {
    Done,
    NotReady,
    Lost,
    Failed { status: c_uint, vendor: u32 },
}

/// Registered memory range.
struct Place {
    /// Address in this process.
    address: u64,
    /// GPU whose flush makes writes visible.
    flushed_gpu: Option<GpuId>,
}

impl Network {
    /// Executes a queue pair's requests, as far as they arrive.
    pub fn advance(&mut self, number: u32) {
        loop {
            let Some(pair) = self.pairs.get_mut(&number) else { return };
            let context = pair.context;
            match pair.state {
                ERROR => return self.flush(number),
                sys::IBV_QPS_RTS => {}
                _ => return,
            }
            if pair.retry_at.is_some_and(|at| at > Instant::now()) {
                return;
            }
            if self.nic_of(context).is_none_or(|nic| nic.is_paused) {
                return;
            }
            let Some(pair) = self.pairs.get_mut(&number) else { return };
            let Some(mut request) = pair.queue.pop_front() else { return };
            match self.attempt(number, &request) {
                // The repeated write is a duplicate.
                Attempt::Done if request.fault == Some(TwinFault::LoseAcknowledgement) => {
                    request.fault = None;
                    self.lose(number);
                }
                Attempt::Done => {
                    self.acknowledge(number, &request);
                    continue;
                }
                Attempt::Failed { status, vendor } => {
                    self.fail(number, &request, status, vendor);
                    continue;
                }
                Attempt::NotReady => {}
                Attempt::Lost => {
                    if !self.lose(number) {
                        self.fail(number, &request, sys::IBV_WC_RETRY_EXC_ERR, 0x81);
                        continue;
                    }
                }
            }
            if let Some(pair) = self.pairs.get_mut(&number) {
                pair.queue.push_front(request);
            }
            return;
        }
    }

    /// Counts a packet without acknowledgement; false after the last permitted retry.
    fn lose(&mut self, number: u32) -> bool {
        let Some(pair) = self.pairs.get_mut(&number) else { return false };
        let (may_retry, context) = (pair.lose_packet(Instant::now()), pair.context);
        if let Some(nic) = self.nic_of(context) {
            nic.lost_packets += 1;
        }
        if may_retry && !self.delayed.contains(&number) {
            self.delayed.push(number);
        }
        may_retry
    }

    /// Repeats lost packets that are due.
    pub fn expire(&mut self) {
        if self.delayed.is_empty() {
            return;
        }
        let now = Instant::now();
        let is_due = |network: &Network, number: &u32| {
            let pair = network.pairs.get(number);
            pair.is_none_or(|pair| pair.retry_at.is_none_or(|at| at <= now))
        };
        let delayed = std::mem::take(&mut self.delayed);
        let (due, waiting) = delayed.into_iter().partition(|number| is_due(self, number));
        self.delayed = waiting;
        let due: Vec<u32> = due;
        due.into_iter().for_each(|number| self.advance(number));
    }

    fn attempt(&mut self, number: u32, request: &Request) -> Attempt {
        const PROTECTION: Attempt =
            Attempt::Failed { status: sys::IBV_WC_LOC_PROT_ERR, vendor: 0x32 };
        let (mut remote_address, mut key) = (request.remote_address, request.key);
        match request.fault {
            Some(TwinFault::Fail { status, vendor }) => return Attempt::Failed { status, vendor },
            Some(TwinFault::WrongKey) => key ^= 0x8000_0000,
            Some(TwinFault::BeyondRange) => remote_address = remote_address.wrapping_add(1 << 40),
            Some(TwinFault::LoseAcknowledgement) | None => {}
        }
        let Some(pair) = self.pairs.get(&number) else { return PROTECTION };
        let Some(source) = self.pieces(pair, &request.source) else { return PROTECTION };
        let (packet, target) = (pair.next_packet(), pair.remote);
        let remote = self.pairs.get(&target).filter(|remote| remote.is_receiving());
        let Some(remote) = remote.filter(|remote| self.is_addressed(pair, remote)) else {
            return Attempt::Lost;
        };
        match remote.sequence(packet) {
            Sequence::Expected => {}
            Sequence::Duplicate => return Attempt::Done,
            Sequence::Ahead => return Attempt::Lost,
        }
        let (receives, queue, domain) = (remote.receives, remote.receive_queue, remote.domain);
        let may_write = remote.access & sys::IBV_ACCESS_REMOTE_WRITE != 0;
        let wanted = sys::IBV_ACCESS_REMOTE_WRITE;
        let place = self.place(key, domain, remote_address, request.length, wanted);
        let place = place.filter(|_| may_write);
        if request.length > 0 && place.is_none() {
            self.reject(target);
            return Attempt::Failed { status: sys::IBV_WC_REM_ACCESS_ERR, vendor: 0x88 };
        }
        let mut receive = None;
        if request.immediate.is_some() {
            let Some(receives) = self.receives.get_mut(&receives) else { return Attempt::Lost };
            receive = receives.posted.pop_front();
            if receive.is_none() {
                if !receives.waiting.contains(&number) {
                    receives.waiting.push(number);
                }
                return Attempt::NotReady;
            }
        }
        if let Some(place) = place {
            self.write(&source, place, key);
        }
        if let Some(remote) = self.pairs.get_mut(&target) {
            remote.accept(request.length);
        }
        if let (Some(wr_id), Some(imm_data)) = (receive, request.immediate) {
            let completion = sys::Completion {
                wr_id,
                opcode: sys::IBV_WC_RECV_RDMA_WITH_IMM,
                byte_len: request.length as u32,
                imm_data,
                qp_num: target,
                wc_flags: sys::IBV_WC_WITH_IMM,
                ..sys::Completion::default()
            };
            self.complete(queue, Entry { completion, reclaims: None });
        }
        Attempt::Done
    }

    /// Request bytes, by address and length; `None` if a key does not permit them.
    fn pieces(&self, pair: &TwinPair, source: &Source) -> Option<Vec<(u64, u64)>> {
        let piece = |range: &sys::Sge| {
            let length = range.length.into();
            Some((self.place(range.lkey, pair.domain, range.addr, length, 0)?.address, length))
        };
        match source {
            Source::Inline(bytes) => Some(vec![(bytes.as_ptr() as u64, bytes.len() as u64)]),
            Source::Ranges(ranges) => ranges.iter().map(piece).collect(),
        }
    }

    /// Range position within a protection domain; `None` if the key does not permit the access.
    fn place(
        &self,
        key: u32,
        domain: u32,
        begin: u64,
        length: u64,
        access: c_uint,
    ) -> Option<Place> {
        let region = self.regions.get(&key)?;
        let offset = begin.checked_sub(region.begin)?;
        let is_inside = offset.checked_add(length)? <= region.length;
        let is_permitted = is_inside && region.domain == domain && region.access & access == access;
        let (address, flushed_gpu) = (region.address + offset, region.flushed_gpu);
        is_permitted.then_some(Place { address, flushed_gpu })
    }

    /// Writes a request's bytes to a place that the key permits, or withholds them.
    fn write(&mut self, source: &[(u64, u64)], place: Place, key: u32) {
        let Place { address: mut to, flushed_gpu } = place;
        for &(from, length) in source {
            let copy = |from: u64, to: u64| {
                // SAFETY: both ranges are registered, so the owners keep them; a region slice that is
                // written at the same time has no defined contents, as with a NIC.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, length as usize) };
            };
            match flushed_gpu {
                None => copy(from, to),
                Some(gpu) => {
                    let mut bytes = vec![0; length as usize];
                    copy(from, bytes.as_mut_ptr() as u64);
                    twin_gpus::withhold(WithheldWrite { gpu, key, to, bytes });
                }
            }
            to += length;
        }
    }

    /// True if a queue pair's route leads to another's port.
    fn is_addressed(&self, from: &TwinPair, to: &TwinPair) -> bool {
        let nic = self.contexts.get(&to.context).and_then(|context| self.nics.get(&context.nic));
        let Some(nic) = nic else { return false };
        match from.route.is_global {
            0 => nic.info.lid(to.port) == from.route.dlid,
            _ => nic.info.gids(to.port).iter().any(|(gid, _)| *gid == from.route.grh.dgid),
        }
    }

    fn acknowledge(&mut self, number: u32, request: &Request) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        pair.acknowledged(request.length);
        let queue = pair.send_queue;
        if request.is_signalled {
            self.complete(queue, sent(number, request, sys::IBV_WC_SUCCESS, 0));
        }
    }

    /// Completes a request with an error, and all behind it as flushed.
    fn fail(&mut self, number: u32, request: &Request, status: c_uint, vendor: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        pair.state = ERROR;
        let queue = pair.send_queue;
        self.complete(queue, sent(number, request, status, vendor));
        self.flush(number);
    }

    /// Puts a queue pair that received a forbidden write into the error state.
    fn reject(&mut self, number: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        pair.state = ERROR;
        let (context, handle) = (pair.context, pair.handle);
        self.raise(context, sys::IBV_EVENT_QP_ACCESS_ERR, handle);
        self.flush(number);
    }

    /// Completes all requests on a queue pair in the error state.
    pub fn flush(&mut self, number: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        let (queue, flushed) = (pair.send_queue, std::mem::take(&mut pair.queue));
        for request in flushed {
            self.complete(queue, sent(number, &request, sys::IBV_WC_WR_FLUSH_ERR, 0xf5));
        }
    }
}

/// Work request completion.
fn sent(number: u32, request: &Request, status: c_uint, vendor_err: u32) -> Entry {
    let (wr_id, qp_num) = (request.wr_id, number);
    let completion =
        sys::Completion { wr_id, status, vendor_err, qp_num, ..sys::Completion::default() };
    Entry { completion, reclaims: Some(request.index) }
}
