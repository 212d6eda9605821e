//! PCI devices: addresses, classes, PCIe links and network interfaces.

use serde::{Serialize, Serializer};
use std::fmt;

pub(super) const NVIDIA: u16 = 0x10de;

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
    /// Far end of an NVLink that is hidden from a virtual machine.
    pub const UNSEEN: BusId = BusId { domain: u32::MAX, bus: 0xff, device: 0xff, function: 0 };

    /// Parses `0000:07:00.0`, in either case and with a domain of any width.
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

/// Device kind in the PCIe tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// Bridge nearest to the CPU: a root port, or the equivalent in a description.
    RootPort,
    /// A PCIe switch port.
    SwitchPort,
    /// A GPU or another accelerator.
    Gpu,
    /// A network interface.
    Nic,
    /// Another device.
    Other,
}

impl DeviceKind {
    /// Kind by PCI class and vendor.
    pub(crate) fn of_class(class: u32, vendor: u16) -> DeviceKind {
        const AMD: u16 = 0x1002;
        match class >> 8 {
            0x0604 => DeviceKind::SwitchPort,
            // A board management controller's display is not a GPU.
            0x0300 | 0x0302 | 0x0380 if matches!(vendor, NVIDIA | AMD) => DeviceKind::Gpu,
            0x1200 => DeviceKind::Gpu,
            0x0200 | 0x0207 => DeviceKind::Nic,
            _ => DeviceKind::Other,
        }
    }
}

/// PCIe link speed and width, negotiated or maximal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PcieLink {
    /// GT/s per lane; 0 if unknown.
    pub gt_per_s: f64,
    /// Lanes; 0 if unknown.
    pub width: u32,
}

impl PcieLink {
    /// GB/s in each direction after line encoding and before any protocol: 8b/10b up to 5 GT/s, 128b/130b up to 32,
    /// 242-byte flits in 256 bytes above.
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

    /// Parses `16.0 GT/s PCIe` and `16 GT/s`; 0 if invalid.
    pub(crate) fn speed(text: &str) -> f64 {
        let number = text.split_whitespace().next().and_then(|number| number.parse().ok());
        number.filter(|speed: &f64| speed.is_finite() && (0.0..1e4).contains(speed)).unwrap_or(0.0)
    }
}

/// A NIC's network interface: an RDMA device port, or an Ethernet device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Interface {
    /// Interface name: `mlx5_0`, `eth0`.
    pub name: String,
    /// Gb/s, if known.
    pub gbps: Option<f64>,
    /// True for an RDMA device.
    pub rdma: bool,
    /// Interface port, from 1.
    pub port: u32,
    /// GUID, if it has one.
    pub guid: Option<String>,
}

/// A device in the PCIe tree.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// PCI address.
    pub bus_id: BusId,
    /// Device kind.
    pub kind: DeviceKind,
    /// Parent bridge: an index into [`Host::devices`](super::Host::devices), below this device's index.
    pub parent: Option<usize>,
    /// The host bridge, such as `pci0000:00`.
    pub host_bridge: String,
    /// The PCI class, 24 bits.
    pub class: u32,
    /// The vendor.
    pub vendor: u16,
    /// The vendor's number for it.
    pub device: u16,
    /// NUMA node, if known.
    pub numa: Option<u32>,
    /// Link to the parent, at maximum speed and width.
    pub link: PcieLink,
    /// Link as negotiated now. Idle GPUs lower the speed, so only a lower width indicates a fault.
    pub link_now: PcieLink,
    /// Product name, if known.
    pub name: Option<String>,
    /// Network interfaces on a NIC.
    pub interfaces: Vec<Interface>,
    /// The GPU's number, if known.
    pub gpu_index: Option<u32>,
    /// The compute capability, as NCCL writes it: 80.
    pub sm: Option<u32>,
    /// True if the GPU is partitioned into instances (MIG).
    pub mig: Option<bool>,
}

impl Device {
    /// Rate of the fastest interface, in GB/s.
    pub fn network_gb_per_s(&self) -> Option<f64> {
        self.interfaces
            .iter()
            .filter_map(|interface| interface.gbps)
            .reduce(f64::max)
            .map(|g| g / 8.0)
    }

    /// True if one interface is an RDMA device.
    pub fn is_rdma(&self) -> bool {
        self.interfaces.iter().any(|interface| interface.rdma)
    }
}
