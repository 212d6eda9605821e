//! What traffic at the same time leaves of the links that it shares.

use super::model::{Device, Distance, Host};
use serde::Serialize;
use std::collections::BTreeMap;

/// What the costs stand on. All are stated with every result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Assumptions {
    /// The part of a PCIe link's raw rate (after line encoding) that payload gets: packets of 256 bytes carry
    /// about 24 bytes of headers and checks, and flow control takes its share. 0.8 gives 12.6 GB/s on PCIe 3
    /// x16, where 12 to 13 are commonly measured.
    pub pcie_payload: f64,
    /// By how much traffic between two PCIe devices that passes the CPU's root complex is slower than the links
    /// it crosses. 1.2 is what NCCL takes for Intel CPUs.
    pub root_complex_slowdown: f64,
    /// GB/s between two NUMA nodes in each direction, for all peer-to-peer traffic together. NCCL takes 6 to 22,
    /// by CPU; 10 is its figure for Skylake.
    pub numa_gb_per_s: f64,
    /// Gb/s of a NIC that does not say its rate.
    pub nic_gbps: f64,
}

impl Default for Assumptions {
    fn default() -> Assumptions {
        Assumptions {
            pcie_payload: 0.8,
            root_complex_slowdown: 1.2,
            numa_gb_per_s: 10.0,
            nic_gbps: 100.0,
        }
    }
}

/// Traffic between two devices, one of many at the same time.
#[derive(Clone, Copy)]
pub struct Flow {
    pub from: usize,
    pub to: usize,
}

/// What flows at the same time leave of the links that they share.
pub struct Shares<'a> {
    host: &'a Host,
    assumptions: &'a Assumptions,
    /// Flows up and down the link above each device.
    up: Vec<u32>,
    down: Vec<u32>,
    /// Flows from one NUMA node to another.
    numa: BTreeMap<(Option<u32>, Option<u32>), u32>,
}

impl<'a> Shares<'a> {
    pub fn new(host: &'a Host, assumptions: &'a Assumptions, flows: &[Flow]) -> Shares<'a> {
        let devices = host.devices.len();
        let (up, down) = (vec![0; devices], vec![0; devices]);
        let mut shares = Shares { host, assumptions, up, down, numa: BTreeMap::new() };
        for &flow in flows {
            let (up, down) = shares.path(flow);
            up.iter().for_each(|&device| shares.up[device] += 1);
            down.iter().for_each(|&device| shares.down[device] += 1);
            if host.distance(flow.from, flow.to) == Distance::System {
                *shares.numa.entry(shares.nodes(flow)).or_insert(0) += 1;
            }
        }
        shares
    }

    /// Devices whose link above is crossed on the way up, and those on the way down.
    fn path(&self, flow: Flow) -> (Vec<usize>, Vec<usize>) {
        let common = self.host.common(flow.from, flow.to);
        let way = |from: usize| {
            let bridges = self.host.above(from).into_iter();
            let mut way = vec![from];
            way.extend(bridges.take_while(|&bridge| Some(bridge) != common));
            way
        };
        (way(flow.from), way(flow.to))
    }

    fn nodes(&self, flow: Flow) -> (Option<u32>, Option<u32>) {
        (self.host.devices[flow.from].numa, self.host.devices[flow.to].numa)
    }

    /// GB/s that a flow gets: the least of its shares. Links of unknown rate do not limit it.
    pub fn of(&self, flow: Flow) -> Option<f64> {
        let (up, down) = self.path(flow);
        let share = |device: &usize, flows: &[u32]| {
            let rate = payload_now(&self.host.devices[*device], self.assumptions)?;
            Some(rate / f64::from(flows[*device].max(1)))
        };
        let shares = up.iter().filter_map(|device| share(device, &self.up));
        let shares = shares.chain(down.iter().filter_map(|device| share(device, &self.down)));
        let mut least = shares.reduce(f64::min);
        let distance = self.host.distance(flow.from, flow.to);
        if !distance.is_switched() {
            least = least.map(|rate| rate / self.assumptions.root_complex_slowdown);
        }
        if distance == Distance::System {
            let flows = self.numa.get(&self.nodes(flow)).copied().unwrap_or(1);
            let share = self.assumptions.numa_gb_per_s / f64::from(flows.max(1));
            least = Some(least.map_or(share, |rate| rate.min(share)));
        }
        least
    }
}

/// GB/s of payload that the link above a device could carry, with all its lanes.
pub fn payload(device: &Device, assumptions: &Assumptions) -> Option<f64> {
    device.link.raw_gb_per_s().map(|raw| raw * assumptions.pcie_payload)
}

/// The same with the lanes that are in use.
fn payload_now(device: &Device, assumptions: &Assumptions) -> Option<f64> {
    let (most, now) = (device.link.width, device.link_now.width);
    let share = if (1..most).contains(&now) { f64::from(now) / f64::from(most) } else { 1.0 };
    payload(device, assumptions).map(|rate| rate * share)
}
