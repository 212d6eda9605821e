//! Server: devices, and the distances between them.

use super::device::{Device, DeviceKind, NVIDIA};
use super::nvlink::{NvLink, NvLinkMap};
use serde::Serialize;
use std::sync::Arc;

/// Distance between two devices, nearest first, with the short names from `nvidia-smi topo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distance {
    /// Under one PCIe switch, one port each (PIX).
    Switch,
    /// Under cascaded PCIe switches (PXB).
    Switches,
    /// Under one host bridge: by the CPU's root complex (PHB).
    RootComplex,
    /// On one NUMA node (NODE).
    NumaNode,
    /// Across NUMA nodes (SYS).
    System,
}

impl Distance {
    /// Name in `nvidia-smi topo`.
    pub fn short(self) -> &'static str {
        match self {
            Distance::Switch => "PIX",
            Distance::Switches => "PXB",
            Distance::RootComplex => "PHB",
            Distance::NumaNode => "NODE",
            Distance::System => "SYS",
        }
    }

    /// True if the path crosses PCIe switches only, and not the CPU.
    pub fn is_switched(self) -> bool {
        self <= Distance::Switches
    }
}

/// A server.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Host {
    /// GPUs, NICs and the bridges above them; each parent before the children.
    pub devices: Vec<Device>,
    /// True if all switch ports are listed, as in sysfs; NCCL lists only the upstream port.
    pub lists_ports: bool,
    /// NVLinks, if known.
    pub nvlinks: Vec<NvLink>,
    /// NVSwitches on the PCI bus, assumed to join all GPUs unless `nvlinks` has entries.
    pub nvswitches: u32,
    /// NUMA nodes with CPUs.
    pub numa_nodes: Vec<(u32, String)>,
    /// Entries that were missing or invalid, one sentence each.
    pub notes: Vec<String>,
    /// NCCL's XML from which the server was read: the model has only some attributes.
    #[serde(skip)]
    pub(super) xml: Option<Arc<str>>,
}

impl Host {
    /// Device indices of one kind.
    pub fn of_kind(&self, kind: DeviceKind) -> impl Iterator<Item = usize> {
        (0..self.devices.len()).filter(move |&index| self.devices[index].kind == kind)
    }

    /// Bridges above a device, nearest first.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn above(&self, device: usize) -> Vec<usize> {
        std::iter::successors(self.devices[device].parent, |&bridge| self.devices[bridge].parent)
            .collect()
    }

    /// Bridge nearest to the CPU above a device, if any.
    pub fn root_port(&self, device: usize) -> Option<usize> {
        self.above(device).last().copied()
    }

    /// Nearest common bridge above two devices.
    pub fn common(&self, one: usize, other: usize) -> Option<usize> {
        let others = self.above(other);
        self.above(one).into_iter().find(|bridge| others.contains(bridge))
    }

    /// Distance between two devices.
    pub fn distance(&self, one: usize, other: usize) -> Distance {
        let (first, second) = (&self.devices[one], &self.devices[other]);
        if let Some(common) = self.common(one, other) {
            let steps = |device| self.above(device).iter().take_while(|&&at| at != common).count();
            // Each device has a separate downstream port below a switch's upstream port, where listed.
            let direct = usize::from(self.lists_ports);
            return match steps(one).max(steps(other)) <= direct {
                true => Distance::Switch,
                false => Distance::Switches,
            };
        }
        match (first.numa, second.numa) {
            (Some(here), Some(there)) if here != there => Distance::System,
            _ if first.host_bridge == second.host_bridge => Distance::RootComplex,
            _ => Distance::NumaNode,
        }
    }

    /// Device label: `GPU0`, `mlx5_0`, else the address.
    pub fn label(&self, device: usize) -> String {
        let it = &self.devices[device];
        match it.kind {
            DeviceKind::Gpu => {
                let number = self.gpus().into_iter().position(|gpu| gpu == device);
                format!("GPU{}", it.gpu_index.or(number.map(|n| n as u32)).unwrap_or(0))
            }
            DeviceKind::Nic if !it.interfaces.is_empty() => {
                let rdma = it.interfaces.iter().find(|interface| interface.rdma);
                rdma.unwrap_or(&it.interfaces[0]).name.clone()
            }
            _ => it.bus_id.to_string(),
        }
    }

    /// Counts NVSwitches, and removes all devices but GPUs, NICs and the bridges above them.
    pub(crate) fn prune(&mut self) {
        const BRIDGE_OF_ANOTHER_KIND: u32 = 0x0680;
        let nvswitch = |device: &&Device| {
            device.class >> 8 == BRIDGE_OF_ANOTHER_KIND && device.vendor == NVIDIA
        };
        self.nvswitches = self.devices.iter().filter(nvswitch).count() as u32;
        let mut wanted = vec![false; self.devices.len()];
        for device in (0..self.devices.len()).rev() {
            wanted[device] |=
                matches!(self.devices[device].kind, DeviceKind::Gpu | DeviceKind::Nic);
            if let (true, Some(parent)) = (wanted[device], self.devices[device].parent) {
                wanted[parent] = true;
            }
        }
        let mut new_index = vec![usize::MAX; self.devices.len()];
        let mut kept = Vec::new();
        for (index, mut device) in std::mem::take(&mut self.devices).into_iter().enumerate() {
            if wanted[index] {
                new_index[index] = kept.len();
                device.parent = device.parent.map(|parent| new_index[parent]);
                kept.push(device);
            }
        }
        self.devices = kept;
    }

    /// GPUs, in address order.
    pub fn gpus(&self) -> Vec<usize> {
        self.by_address(DeviceKind::Gpu)
    }

    fn by_address(&self, kind: DeviceKind) -> Vec<usize> {
        let mut found: Vec<usize> = self.of_kind(kind).collect();
        found.sort_by_key(|&device| self.devices[device].bus_id);
        found
    }

    /// NICs for GPU traffic: RDMA devices if there are any, else all.
    pub fn nics(&self) -> Vec<usize> {
        let nics = self.by_address(DeviceKind::Nic);
        let rdma: Vec<usize> =
            nics.iter().copied().filter(|&nic| self.devices[nic].is_rdma()).collect();
        if rdma.is_empty() { nics } else { rdma }
    }

    /// GPU pairs joined by NVLink.
    pub fn nvlinked(&self) -> NvLinkMap {
        NvLinkMap::new(&self.nvlinks, self.nvswitches)
    }
}
