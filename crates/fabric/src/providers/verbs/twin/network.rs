//! Twin network: all objects on all NICs in the process under one lock.

use super::super::super::twin_gpus::GpuId;
use super::super::sys;
use super::faults::TwinFault;
use super::nic_info::NicInfo;
use super::pair::{Request, TwinPair};
use super::queues::{CompletionEntries, Entry, OpenContext, Receives, notify};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::{c_int, c_uint};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// NIC with faults and counters.
pub struct NicRecord {
    pub info: Arc<NicInfo>,
    /// False once the owner has dropped it: no list names it.
    pub is_listed: bool,
    pub is_paused: bool,
    /// Work requests and posts so far.
    pub requests: u64,
    pub posts: u64,
    /// Faults by work request number.
    pub faults: Vec<(u64, TwinFault)>,
    /// Error numbers by post number.
    pub refusals: Vec<(u64, c_int)>,
    pub overflows: u64,
    pub lost_packets: u64,
}

/// Registered memory.
pub struct RegisteredRange {
    pub context: u32,
    pub domain: u32,
    /// First byte's address in work requests, and in this process.
    pub begin: u64,
    pub address: u64,
    pub length: u64,
    pub access: c_uint,
    /// Bytes that were prefetched.
    pub prefetched: u64,
    /// GPU whose flush makes writes visible.
    pub flushed_gpu: Option<GpuId>,
}

#[derive(Default)]
pub struct Network {
    pub nics: BTreeMap<u32, NicRecord>,
    pub contexts: HashMap<u32, OpenContext>,
    /// Protection domains, with contexts.
    pub domains: HashMap<u32, u32>,
    /// By key, which is local and remote.
    pub regions: HashMap<u32, RegisteredRange>,
    /// Handles for queues with an unread event, by descriptor.
    pub channels: HashMap<c_int, VecDeque<usize>>,
    pub queues: HashMap<u32, CompletionEntries>,
    pub receives: HashMap<u32, Receives>,
    /// By number.
    pub pairs: HashMap<u32, TwinPair>,
    /// Queue pairs with a lost packet.
    pub delayed: Vec<u32>,
    issued: u32,
}

static NETWORK: LazyLock<Mutex<Network>> = LazyLock::new(Mutex::default);

/// This process's network.
pub fn network() -> MutexGuard<'static, Network> {
    NETWORK.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Network {
    /// Number for a new object, a queue pair or key among them.
    pub fn issue(&mut self) -> u32 {
        self.issued += 1;
        0x100 + self.issued
    }

    /// NIC that an open device belongs to.
    pub fn nic_of(&mut self, context: u32) -> Option<&mut NicRecord> {
        let nic = self.contexts.get(&context)?.nic;
        self.nics.get_mut(&nic)
    }

    /// Queues a work request, with the fault if any, on a queue pair that can send.
    pub fn enqueue(&mut self, number: u32, mut request: Request) -> Result<(), c_int> {
        let pair = self.pairs.get(&number).ok_or(libc::EINVAL)?;
        if pair.posted - pair.reclaimed >= pair.capacity {
            return Err(libc::ENOMEM);
        }
        let context = pair.context;
        let nic = self.nic_of(context).ok_or(libc::EIO)?;
        nic.requests += 1;
        let number_of_request = nic.requests;
        let fault = nic.faults.iter().position(|(at, _)| *at == number_of_request);
        request.fault = fault.map(|at| nic.faults.swap_remove(at).1);
        if let Some(pair) = self.pairs.get_mut(&number) {
            request.index = pair.posted;
            pair.posted += 1;
            pair.queue.push_back(request);
        }
        Ok(())
    }

    pub fn complete(&mut self, queue: u32, entry: Entry) {
        let Some(entries) = self.queues.get_mut(&queue) else { return };
        let (context, handle) = (entries.context, entries.handle);
        match entries.push(entry) {
            Ok(None) => {}
            Ok(Some(channel)) => {
                if let Some(unread) = self.channels.get_mut(&channel) {
                    unread.push_back(handle);
                    notify(channel);
                }
            }
            Err(()) => {
                if let Some(nic) = self.nic_of(context) {
                    nic.overflows += 1;
                }
                self.raise(context, sys::IBV_EVENT_CQ_ERR, handle);
            }
        }
    }

    pub fn raise(&mut self, context: u32, kind: c_uint, element: usize) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.raise(kind, element);
        }
    }

    /// Moves completions into `read`, at most `count`; `None` after an overflow.
    pub fn poll(
        &mut self,
        queue: u32,
        count: usize,
        mut read: impl FnMut(sys::Completion),
    ) -> c_int {
        self.expire();
        let Some(entries) = self.queues.get_mut(&queue) else { return -1 };
        if entries.has_overflowed {
            return -1;
        }
        let count = count.min(entries.entries.len());
        for entry in entries.entries.drain(..count) {
            let pair = self.pairs.get_mut(&entry.completion.qp_num);
            if let (Some(pair), Some(index)) = (pair, entry.reclaims) {
                pair.reclaimed = pair.reclaimed.max(index + 1);
            }
            read(entry.completion);
        }
        count as c_int
    }

    /// Continues the writes that waited for a receive.
    pub fn received(&mut self, receives: u32) {
        let Some(receives) = self.receives.get_mut(&receives) else { return };
        let waiting = std::mem::take(&mut receives.waiting);
        waiting.into_iter().for_each(|number| self.advance(number));
    }
}
