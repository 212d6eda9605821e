//! What a server is made of.

use super::nvlink::NvLink;
use serde::{Serialize, Serializer};
use std::fmt;

const NVIDIA: u16 = 0x10de;

/// A PCI address: domain, bus, device, function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BusId {
    /// The domain (segment).
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device.
    pub device: u8,
    /// The function.
    pub function: u8,
}

impl BusId {
    /// Where NVLinks lead that end in what a virtual machine cannot see.
    pub const UNSEEN: BusId = BusId { domain: u32::MAX, bus: 0xff, device: 0xff, function: 0 };

    /// Understands `0000:07:00.0`, in any case and with any width of domain.
    pub fn parse(text: &str) -> Option<BusId> {
        let mut parts = text.trim().split(':');
        let (domain, bus, rest) = (parts.next()?, parts.next()?, parts.next()?);
        let (device, function) = rest.split_once('.')?;
        let hex = |digits: &str| match digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            true => u32::from_str_radix(digits, 16).ok(),
            false => None,
        };
        let small = |digits: &str| hex(digits).and_then(|number| u8::try_from(number).ok());
        let (domain, bus, device) = (hex(domain)?, small(bus)?, small(device)?);
        parts.next().is_none().then_some(BusId { domain, bus, device, function: small(function)? })
    }
}

impl fmt::Display for BusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BusId { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl Serialize for BusId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What a device of the PCIe tree is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// The bridge nearest to the CPU: a root port, or what a description has in its place.
    RootPort,
    /// A port of a PCIe switch.
    SwitchPort,
    /// A GPU or another accelerator.
    Gpu,
    /// A network interface.
    Nic,
    /// Anything else.
    Other,
}

/// A PCIe link as it was negotiated, or could be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PcieLink {
    /// Transfers per second and lane, in 10^9; 0 if it is not known.
    pub gt_per_s: f64,
    /// Lanes; 0 if it is not known.
    pub width: u32,
}

impl PcieLink {
    /// GB/s in each direction after line encoding and before any protocol: 8b/10b up to 5 GT/s, 128b/130b
    /// up to 32, flits of 242 in 256 bytes above.
    pub fn raw_gb_per_s(&self) -> Option<f64> {
        let encoding = match self.gt_per_s {
            speed if !(speed.is_finite() && speed > 0.0) => return None,
            speed if speed <= 5.0 => 8.0 / 10.0,
            speed if speed <= 32.0 => 128.0 / 130.0,
            _ => 242.0 / 256.0,
        };
        (self.width > 0).then(|| self.gt_per_s * encoding * f64::from(self.width) / 8.0)
    }

    /// The generation: 1 for 2.5 GT/s, 6 for 64.
    pub fn generation(&self) -> Option<u32> {
        let speeds = [2.5, 5.0, 8.0, 16.0, 32.0, 64.0];
        let place = speeds.iter().position(|&speed| (self.gt_per_s - speed).abs() < 0.1)?;
        Some(place as u32 + 1)
    }

    /// Understands `16.0 GT/s PCIe` and `16 GT/s`.
    pub(crate) fn speed(text: &str) -> f64 {
        let number = text.split_whitespace().next().and_then(|number| number.parse().ok());
        number.filter(|speed: &f64| speed.is_finite() && (0.0..1e4).contains(speed)).unwrap_or(0.0)
    }
}

/// A network interface of a NIC: an RDMA device's port, or an Ethernet device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Interface {
    /// Its name: `mlx5_0`, `eth0`.
    pub name: String,
    /// Gb/s, if known.
    pub gbps: Option<f64>,
    /// Whether it does RDMA.
    pub rdma: bool,
    /// Its port, from 1.
    pub port: u32,
    /// Its GUID, if it has one.
    pub guid: Option<String>,
}

/// A device of the PCIe tree.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// Its address.
    pub bus_id: BusId,
    /// What it is.
    pub kind: DeviceKind,
    /// The bridge that it hangs on: an index into [`Host::devices`], less than its own.
    pub parent: Option<usize>,
    /// The host bridge, such as `pci0000:00`.
    pub host_bridge: String,
    /// The PCI class, 24 bits.
    pub class: u32,
    /// The vendor.
    pub vendor: u16,
    /// The vendor's number for it.
    pub device: u16,
    /// Its NUMA node, if known.
    pub numa: Option<u32>,
    /// The link to what is above it, as it could be.
    pub link: PcieLink,
    /// The link as it is now: GPUs at rest lower the speed, so only the width tells a fault.
    pub link_now: PcieLink,
    /// What it is called, if known.
    pub name: Option<String>,
    /// Network interfaces, of a NIC.
    pub interfaces: Vec<Interface>,
    /// The GPU's number, if known.
    pub gpu_index: Option<u32>,
    /// The compute capability, as NCCL writes it: 80.
    pub sm: Option<u32>,
    /// Whether the GPU is cut into instances (MIG).
    pub mig: Option<bool>,
}

impl Device {
    /// The fastest of its interfaces in GB/s.
    pub fn network_gb_per_s(&self) -> Option<f64> {
        self.interfaces
            .iter()
            .filter_map(|interface| interface.gbps)
            .reduce(f64::max)
            .map(|g| g / 8.0)
    }

    /// Whether one of its interfaces does RDMA.
    pub fn is_rdma(&self) -> bool {
        self.interfaces.iter().any(|interface| interface.rdma)
    }
}

/// How far two devices are from each other, nearest first; the short names are those of `nvidia-smi topo`.
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
    /// What `nvidia-smi topo` calls it.
    pub fn short(self) -> &'static str {
        match self {
            Distance::Switch => "PIX",
            Distance::Switches => "PXB",
            Distance::RootComplex => "PHB",
            Distance::NumaNode => "NODE",
            Distance::System => "SYS",
        }
    }

    /// Whether a PCIe switch joins the two, so that the CPU is not on their way.
    pub fn is_switched(self) -> bool {
        self <= Distance::Switches
    }
}

/// A server.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Host {
    /// All devices that lead to a GPU or a NIC, and those; a parent stands before its children.
    pub devices: Vec<Device>,
    /// Whether every port of a switch is listed, as in sysfs. NCCL lists only that towards the CPU.
    pub lists_ports: bool,
    /// NVLinks, if known.
    pub nvlinks: Vec<NvLink>,
    /// NVSwitches on the PCI bus, which join all GPUs by NVLink; where NVML says more, it is in `nvlinks`.
    pub nvswitches: u32,
    /// NUMA nodes and their CPUs.
    pub numa_nodes: Vec<(u32, String)>,
    /// What could not be read or believed.
    pub notes: Vec<String>,
}

impl Host {
    /// The devices of a kind, by index.
    pub fn of_kind(&self, kind: DeviceKind) -> impl Iterator<Item = usize> {
        (0..self.devices.len()).filter(move |&index| self.devices[index].kind == kind)
    }

    /// The bridges above a device, nearest first.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn above(&self, device: usize) -> Vec<usize> {
        std::iter::successors(self.devices[device].parent, |&bridge| self.devices[bridge].parent)
            .collect()
    }

    /// The bridge nearest to the CPU above a device, if it hangs on one.
    pub fn root_port(&self, device: usize) -> Option<usize> {
        self.above(device).last().copied()
    }

    /// The nearest bridge above both devices.
    pub fn common(&self, one: usize, other: usize) -> Option<usize> {
        let others = self.above(other);
        self.above(one).into_iter().find(|bridge| others.contains(bridge))
    }

    /// How far two devices are from each other.
    pub fn distance(&self, one: usize, other: usize) -> Distance {
        let (first, second) = (&self.devices[one], &self.devices[other]);
        if let Some(common) = self.common(one, other) {
            let steps = |device| self.above(device).iter().take_while(|&&at| at != common).count();
            // Below a switch's upper port each device has a lower port, where those are listed.
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

    /// A device's name for people: `GPU0`, `mlx5_0`, else its address.
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

    /// What a device is, from its class and vendor.
    pub(crate) fn kind_of(class: u32, vendor: u16) -> DeviceKind {
        const AMD: u16 = 0x1002;
        match class >> 8 {
            0x0604 => DeviceKind::SwitchPort,
            // The display of a board's management controller is no GPU.
            0x0300 | 0x0302 | 0x0380 if matches!(vendor, NVIDIA | AMD) => DeviceKind::Gpu,
            0x1200 => DeviceKind::Gpu,
            0x0200 | 0x0207 => DeviceKind::Nic,
            _ => DeviceKind::Other,
        }
    }

    /// Keeps GPUs, NICs and the bridges above them, names root ports, and drops what leads nowhere.
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
        let mut places = vec![usize::MAX; self.devices.len()];
        let mut kept = Vec::new();
        for (index, mut device) in std::mem::take(&mut self.devices).into_iter().enumerate() {
            if wanted[index] {
                places[index] = kept.len();
                device.parent = device.parent.map(|parent| places[parent]);
                kept.push(device);
            }
        }
        self.devices = kept;
    }
}
