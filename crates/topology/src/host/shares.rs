//! Bandwidth for concurrent flows on shared PCIe links.

use super::device::Device;
use super::model::{Distance, Host};
use serde::Serialize;
use std::collections::BTreeMap;

/// Cost model assumptions; each report lists them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Assumptions {
    /// Fraction of a PCIe link's raw rate (after line encoding) available to payload: 256-byte packets carry about 24
    /// bytes for headers and checks, and flow control takes bandwidth. 0.8 gives 12.6 GB/s on PCIe 3 x16, where 12 to
    /// 13 are commonly measured.
    pub pcie_payload: f64,
    /// Slowdown for peer-to-peer traffic through the CPU's root complex, relative to the links. NCCL assumes 1.2 for
    /// Intel CPUs.
    pub root_complex_slowdown: f64,
    /// GB/s between two NUMA nodes in each direction, for all peer-to-peer traffic. NCCL assumes 6 to 22 by CPU,
    /// 10 for Skylake.
    pub numa_gb_per_s: f64,
    /// Gb/s for a NIC with unknown rate.
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

/// Traffic from one device to another.
#[derive(Clone, Copy)]
pub struct DeviceFlow {
    pub from: usize,
    pub to: usize,
}

/// Bandwidth for concurrent flows that share links.
pub struct BandwidthShares<'a> {
    host: &'a Host,
    assumptions: &'a Assumptions,
    /// Number of flows up and down the link above each device.
    up: Vec<u32>,
    down: Vec<u32>,
    /// Number of flows from one NUMA node to another.
    numa: BTreeMap<(Option<u32>, Option<u32>), u32>,
}

impl<'a> BandwidthShares<'a> {
    pub fn new(
        host: &'a Host,
        assumptions: &'a Assumptions,
        flows: &[DeviceFlow],
    ) -> BandwidthShares<'a> {
        let devices = host.devices.len();
        let (up, down) = (vec![0; devices], vec![0; devices]);
        let mut shares = BandwidthShares { host, assumptions, up, down, numa: BTreeMap::new() };
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

    /// Devices whose upward link is crossed, on the way up and on the way down.
    fn path(&self, flow: DeviceFlow) -> (Vec<usize>, Vec<usize>) {
        let common = self.host.common(flow.from, flow.to);
        let way = |from: usize| {
            let bridges = self.host.above(from).into_iter();
            let mut way = vec![from];
            way.extend(bridges.take_while(|&bridge| Some(bridge) != common));
            way
        };
        (way(flow.from), way(flow.to))
    }

    fn nodes(&self, flow: DeviceFlow) -> (Option<u32>, Option<u32>) {
        (self.host.devices[flow.from].numa, self.host.devices[flow.to].numa)
    }

    /// Flow rate in GB/s: the minimum over the flow's links; links with unknown rate are skipped.
    pub fn of(&self, flow: DeviceFlow) -> Option<f64> {
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

/// Payload GB/s on the link above a device, with all lanes.
pub fn payload(device: &Device, assumptions: &Assumptions) -> Option<f64> {
    device.link.raw_gb_per_s().map(|raw| raw * assumptions.pcie_payload)
}

/// Payload GB/s with the lanes in use.
fn payload_now(device: &Device, assumptions: &Assumptions) -> Option<f64> {
    let (most, now) = (device.link.width, device.link_now.width);
    let share = if (1..most).contains(&now) { f64::from(now) / f64::from(most) } else { 1.0 };
    payload(device, assumptions).map(|rate| rate * share)
}
