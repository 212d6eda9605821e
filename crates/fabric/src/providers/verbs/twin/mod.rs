//! Twin of RDMA NICs within this process, for tests and benchmarks of the provider without a NIC.
//!
//! It implements the functions of [`Library`] and of a context's table as hardware behaves towards their
//! callers: keys, ranges and states are checked, slots of a send queue are free once a completion behind
//! them was read, errors flush what follows, and full queues overflow. All NICs of a process are one network.
//!
//! - `calls.rs`, `objects.rs`, `data_path.rs`: the functions
//! - `network.rs`, `pair.rs`, `queues.rs`: objects behind their handles
//! - `delivery.rs`: the way of a write
//! - `gpus.rs`: GPUs, which see writes after a flush
//! - `null.rs`: the null device, for benchmarks of posting

mod calls;
mod data_path;
mod delivery;
mod gpus;
mod network;
mod null;
mod objects;
mod pair;
mod queues;

use super::library::Library;
use super::sys;
pub use gpus::{TwinGpuControls, TwinGpus};
use network::{NicRecord, network};
use std::ffi::{CString, c_int, c_uint};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Limits and ports of a NIC.
#[derive(Clone, Debug)]
pub struct TwinConfig {
    /// Entries of a completion queue.
    pub max_cqe: i32,
    /// Work requests of a send queue.
    pub max_qp_wr: i32,
    /// Receives of a shared queue.
    pub max_srq_wr: i32,
    /// Longest write that a work request holds itself.
    pub max_inline: u32,
    /// Longest message of a port.
    pub max_message: u32,
    /// It pages regions on demand.
    pub on_demand_paging: bool,
    /// Longest region whose memory can be locked.
    pub max_locked: u64,
    /// Longest region that is paged on demand.
    pub max_paged: u64,
    /// States of the ports.
    pub ports: Vec<TwinPort>,
}

impl Default for TwinConfig {
    fn default() -> TwinConfig {
        TwinConfig {
            max_cqe: 1 << 20,
            max_qp_wr: 1 << 14,
            max_srq_wr: 1 << 20,
            max_inline: 220,
            max_message: 1 << 30,
            on_demand_paging: false,
            max_locked: u64::MAX,
            max_paged: u64::MAX,
            ports: vec![TwinPort::default()],
        }
    }
}

/// Port of a NIC.
#[derive(Clone, Copy, Debug)]
pub struct TwinPort {
    /// State ACTIVE; DOWN otherwise.
    pub is_active: bool,
    /// RoCE; InfiniBand otherwise.
    pub is_ethernet: bool,
}

impl Default for TwinPort {
    fn default() -> TwinPort {
        TwinPort { is_active: true, is_ethernet: true }
    }
}

/// Fault of one work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TwinFault {
    /// It completes with an error.
    Fail {
        /// Status of libibverbs.
        status: u32,
        /// Code of the vendor.
        vendor: u32,
    },
    /// Its remote key names no region.
    WrongKey,
    /// Its remote range lies outside of the region.
    BeyondRange,
    /// It arrives, and its acknowledgement is lost.
    LoseAcknowledgement,
}

/// Asynchronous event of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TwinEvent {
    /// The device has failed, and its queue pairs with it.
    DeviceFatal,
    /// A port went down.
    PortDown(u8),
    /// A port is active again.
    PortUp(u8),
    /// A queue pair has failed, without a completion.
    PairFatal(u32),
}

/// Counters of a NIC.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TwinStatistics {
    /// Completions for which a queue had no entry.
    pub overflows: u64,
    /// Packets without an acknowledgement.
    pub lost_packets: u64,
    /// Work requests posted.
    pub requests: u64,
    /// Contexts, domains, registrations, queues and queue pairs that are not destroyed.
    pub live_objects: usize,
    /// Regions paged on demand, and bytes of them that were prefetched.
    pub paged: (usize, u64),
    /// Length and highest fill of each completion queue.
    pub queues: Vec<(usize, usize)>,
}

/// Chains of work requests that one post each has accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TwinChains {
    /// Those that write bytes.
    pub data: u64,
    /// Those of an empty write: credits, reports of consumption, greetings, farewells.
    pub signals: u64,
}

/// Identity and configuration of a NIC.
pub struct NicInfo {
    number: u32,
    name: CString,
    config: TwinConfig,
    /// 0: live. Otherwise a null device, whose completions follow after this number of polls less one.
    null: AtomicU32,
}

impl NicInfo {
    /// GIDs of a port, and their types: those of a link without an address first.
    fn gids(&self, port: u8) -> Vec<(sys::Gid, u32)> {
        const ROCE_V1: u32 = 1;
        let mut local = [0; 16];
        local[..2].copy_from_slice(&[0xfe, 0x80]);
        local[11..15].copy_from_slice(&self.number.to_be_bytes());
        local[15] = port;
        let mut ipv4 = local;
        ipv4[..12].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
        match self.config.ports.get(usize::from(port.wrapping_sub(1))) {
            None => Vec::new(),
            Some(found) if found.is_ethernet => vec![
                (sys::Gid(local), ROCE_V1),
                (sys::Gid(local), sys::IBV_GID_TYPE_ROCE_V2),
                (sys::Gid(ipv4), sys::IBV_GID_TYPE_ROCE_V2),
            ],
            Some(_) => vec![(sys::Gid(local), 0)],
        }
    }

    /// Local identifier of a port; 0 on Ethernet.
    fn lid(&self, port: u8) -> u16 {
        let found = self.config.ports.get(usize::from(port.wrapping_sub(1)));
        match found {
            Some(port) if port.is_ethernet => 0,
            _ => (self.number << 3) as u16 + u16::from(port),
        }
    }
}

/// Simulated NIC. [`super::VerbsDevice::over`] opens some; they are listed until they are dropped.
pub struct TwinNic(Arc<NicInfo>);

impl TwinNic {
    /// Adds a NIC to this process.
    pub fn new(config: TwinConfig) -> Arc<TwinNic> {
        let mut network = network();
        let number = network.issue();
        let name = CString::new(format!("twin{number}")).unwrap_or_default();
        let info = Arc::new(NicInfo { number, name, config, null: AtomicU32::new(0) });
        let record = NicRecord {
            info: info.clone(),
            is_listed: true,
            is_paused: false,
            requests: 0,
            posts: 0,
            faults: Vec::new(),
            refusals: Vec::new(),
            overflows: 0,
            lost_packets: 0,
        };
        network.nics.insert(number, record);
        Arc::new(TwinNic(info))
    }

    /// Name of the device.
    pub fn name(&self) -> String {
        self.0.name.to_string_lossy().into_owned()
    }

    /// IPv4 address of a port of RoCE, of which its preferred GID is made.
    pub fn address(&self, port: u8) -> Ipv4Addr {
        let [_, first, second, third] = self.0.number.to_be_bytes();
        Ipv4Addr::new(first, second, third, port)
    }

    /// Number of its ports.
    pub fn ports(&self) -> usize {
        self.0.config.ports.len()
    }

    fn change(&self, change: impl FnOnce(&mut NicRecord)) {
        if let Some(nic) = network().nics.get_mut(&self.0.number) {
            change(nic);
        }
    }

    /// Gives a fault to the work request after `requests` further ones.
    pub fn fault_after(&self, requests: u64, fault: TwinFault) {
        self.change(|nic| nic.faults.push((nic.requests + 1 + requests, fault)));
    }

    /// Refuses the post after `posts` further ones with an error number.
    pub fn refuse_after(&self, posts: u64, error: i32) {
        self.change(|nic| nic.refusals.push((nic.posts + 1 + posts, error)));
    }

    /// Holds all writes of this NIC back, or sends them on.
    pub fn pause(&self, is_paused: bool) {
        self.change(|nic| nic.is_paused = is_paused);
        if !is_paused {
            let mut network = network();
            let mine = self.pairs(&network);
            mine.into_iter().for_each(|number| network.advance(number));
        }
    }

    /// Turns it into a null device: every post is accepted, completes after `polls` polls and moves no byte. Requests and arrivals of before are no longer reported.
    pub fn become_null(&self, polls: u32) {
        self.0.null.store(1 + polls, Ordering::Relaxed);
    }

    /// Reports an event to all who have opened the NIC.
    pub fn raise(&self, event: TwinEvent) {
        let mut network = network();
        let (kind, element) = match event {
            TwinEvent::DeviceFatal => (sys::IBV_EVENT_DEVICE_FATAL, 0),
            TwinEvent::PortDown(port) => (sys::IBV_EVENT_PORT_ERR, usize::from(port)),
            TwinEvent::PortUp(port) => (sys::IBV_EVENT_PORT_ACTIVE, usize::from(port)),
            TwinEvent::PairFatal(number) => {
                let Some(pair) = network.pairs.get_mut(&number) else { return };
                pair.state = pair::ERROR;
                let (context, handle) = (pair.context, pair.handle);
                return network.raise(context, sys::IBV_EVENT_QP_FATAL, handle);
            }
        };
        if event == TwinEvent::DeviceFatal {
            for number in self.pairs(&network) {
                let pair = network.pairs.get_mut(&number);
                pair.into_iter().for_each(|pair| pair.state = sys::IBV_QPS_RESET);
            }
        }
        let mine = network.contexts.values_mut().filter(|context| context.nic == self.0.number);
        mine.for_each(|context| context.raise(kind, element));
    }

    /// Number of the queue pair that is connected to one of another NIC.
    pub fn pair_toward(&self, other: &TwinNic) -> Option<u32> {
        let network = network();
        let theirs = other.pairs(&network);
        let mine = self.pairs(&network);
        mine.into_iter().find(|number| theirs.contains(&network.pairs[number].remote))
    }

    /// Chains posted so far on the queue pairs that are connected to another NIC.
    pub fn chains_toward(&self, other: &TwinNic) -> TwinChains {
        let network = network();
        let theirs = other.pairs(&network);
        let mine = self.pairs(&network).into_iter().map(|number| &network.pairs[&number]);
        let toward = mine.filter(|pair| theirs.contains(&pair.remote));
        toward.fold(TwinChains::default(), |sum, pair| TwinChains {
            data: sum.data + pair.chains.data,
            signals: sum.signals + pair.chains.signals,
        })
    }

    /// Its counters.
    pub fn statistics(&self) -> TwinStatistics {
        let network = network();
        let is_mine = |context: &u32| {
            network.contexts.get(context).is_some_and(|context| context.nic == self.0.number)
        };
        let live_objects = network.contexts.keys().filter(|it| is_mine(it)).count()
            + network.domains.values().filter(|it| is_mine(it)).count()
            + network.regions.values().filter(|it| is_mine(&it.context)).count()
            + network.queues.values().filter(|it| is_mine(&it.context)).count()
            + network.receives.values().filter(|it| is_mine(&it.context)).count()
            + network.pairs.values().filter(|it| is_mine(&it.context)).count();
        let queues = network.queues.values().filter(|it| is_mine(&it.context));
        let queues = queues.map(|it| (it.capacity, it.peak)).collect();
        let regions = network.regions.values().filter(|it| is_mine(&it.context));
        let paged = regions.filter(|it| it.access & sys::IBV_ACCESS_ON_DEMAND != 0);
        let paged = paged.fold((0, 0), |(count, bytes), it| (count + 1, bytes + it.prefetched));
        let Some(nic) = network.nics.get(&self.0.number) else { return TwinStatistics::default() };
        TwinStatistics {
            overflows: nic.overflows,
            lost_packets: nic.lost_packets,
            requests: nic.requests,
            live_objects,
            paged,
            queues,
        }
    }

    /// Numbers of its queue pairs.
    fn pairs(&self, network: &network::Network) -> Vec<u32> {
        let is_mine = |context: &u32| {
            network.contexts.get(context).is_some_and(|context| context.nic == self.0.number)
        };
        let mine = network.pairs.iter().filter(|(_, pair)| is_mine(&pair.context));
        mine.map(|(number, _)| *number).collect()
    }
}

impl Drop for TwinNic {
    fn drop(&mut self) {
        let mut network = network();
        let is_open = network.contexts.values().any(|context| context.nic == self.0.number);
        if is_open {
            network.nics.get_mut(&self.0.number).into_iter().for_each(|nic| nic.is_listed = false);
        } else {
            network.nics.remove(&self.0.number);
        }
    }
}

/// Functions of the twin in place of libibverbs'.
pub(super) fn library() -> &'static Library {
    calls::library()
}

/// Sets `errno`.
fn set_error(error: c_int) {
    // SAFETY: the location is this thread's.
    unsafe { *libc::__errno_location() = error };
}

/// Status of a completion in words.
fn status_text(status: c_uint) -> &'static std::ffi::CStr {
    match status {
        sys::IBV_WC_SUCCESS => c"success",
        sys::IBV_WC_LOC_PROT_ERR => c"local protection error",
        sys::IBV_WC_WR_FLUSH_ERR => c"flushed",
        sys::IBV_WC_REM_ACCESS_ERR => c"remote access error",
        sys::IBV_WC_RETRY_EXC_ERR => c"no acknowledgement after all retries",
        _ => c"unknown status",
    }
}

/// Kind of an asynchronous event in words.
fn event_text(kind: c_uint) -> &'static std::ffi::CStr {
    match kind {
        sys::IBV_EVENT_CQ_ERR => c"completion queue failed",
        sys::IBV_EVENT_QP_FATAL => c"queue pair failed",
        sys::IBV_EVENT_QP_ACCESS_ERR => c"access violation",
        sys::IBV_EVENT_DEVICE_FATAL => c"device failed",
        sys::IBV_EVENT_PORT_ACTIVE => c"port active",
        sys::IBV_EVENT_PORT_ERR => c"port down",
        _ => c"unknown event",
    }
}
