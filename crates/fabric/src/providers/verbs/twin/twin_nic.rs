//! Simulated NIC, with fault controls.

use super::super::sys;
use super::config::TwinConfig;
use super::faults::{TwinEvent, TwinFault};
use super::network::{NicRecord, network};
use super::nic_info::NicInfo;
use super::statistics::{TwinChains, TwinStatistics};
use super::{network, pair};
use std::ffi::CString;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Simulated NIC. [`super::super::VerbsDevice::over`] opens some; they are listed until they are dropped.
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

    /// Device name.
    pub fn name(&self) -> String {
        self.0.name.to_string_lossy().into_owned()
    }

    /// IPv4 address on a RoCE port, from which the preferred GID is made.
    pub fn address(&self, port: u8) -> Ipv4Addr {
        let [_, first, second, third] = self.0.number.to_be_bytes();
        Ipv4Addr::new(first, second, third, port)
    }

    /// Port count.
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

    /// Holds back all writes from this NIC, or sends them on.
    pub fn pause(&self, is_paused: bool) {
        self.change(|nic| nic.is_paused = is_paused);
        if !is_paused {
            let mut network = network();
            let mine = self.pairs(&network);
            mine.into_iter().for_each(|number| network.advance(number));
        }
    }

    /// Turns it into a null device: every post is accepted, completes after `polls` polls and moves no
    /// byte. Earlier requests and arrivals are no longer reported.
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

    /// Number of the queue pair that is connected to another NIC's.
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

    /// NIC counters.
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
        let regions = || network.regions.values().filter(|it| is_mine(&it.context));
        let registered = (regions().count(), regions().map(|it| it.length).sum());
        let paged = regions().filter(|it| it.access & sys::IBV_ACCESS_ON_DEMAND != 0);
        let paged = paged.fold((0, 0), |(count, bytes), it| (count + 1, bytes + it.prefetched));
        let Some(nic) = network.nics.get(&self.0.number) else { return TwinStatistics::default() };
        TwinStatistics {
            overflows: nic.overflows,
            lost_packets: nic.lost_packets,
            requests: nic.requests,
            live_objects,
            registered,
            paged,
            queues,
        }
    }

    /// Numbers of the queue pairs on it.
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
