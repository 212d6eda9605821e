//! Server with GPUs, NICs and the PCIe tree, read from sysfs or NCCL's XML.
//!
//! - `device.rs`: PCI devices with links and network interfaces
//! - `nvlink.rs`: NVLinks and the GPUs that they join
//! - `model.rs`: [`Host`], and distances between devices
//! - `pairs.rs`: GPUs paired with NICs
//! - `nic_choice.rs`: NICs for a rank with a GPU
//! - `shares.rs`: bandwidth for flows that share links
//! - `lint.rs`: findings that cost bandwidth
//! - `sysfs.rs`, `nvml.rs`, `xml/`: sources and formats
//! - `tree.rs`: the tree as text

mod device;
mod lint;
mod model;
mod nic_choice;
mod nvlink;
mod nvml;
mod pairs;
mod shares;
mod sysfs;
mod tree;
mod xml;

pub use device::{BusId, Device, DeviceKind, Interface, PcieLink};
pub use lint::{Finding, Severity};
pub use model::{Distance, Host};
pub use nic_choice::{NicChoice, NoNicChoice, RdmaPort};
pub use nvlink::{NvLink, NvLinkMap};
pub use nvml::NvmlGpu;
pub use pairs::{Pair, Pairing};
pub use shares::Assumptions;

use crate::error::Result;
use std::path::Path;

/// Readers, writers and analyses; `model.rs` has the queries on devices.
impl Host {
    /// Reads the server below `root`, which is `/sys` or a copy of it. Entries that are missing or invalid are
    /// skipped and recorded in [`notes`](Host::notes); the call itself cannot fail.
    pub fn from_sysfs(root: &Path) -> Host {
        sysfs::read_host(root)
    }

    /// Reads NCCL's XML: `system` holds `cpu`, which holds nested `pci` with `gpu`, `nic` and `net`.
    ///
    /// # Errors
    /// [`Error::Xml`](crate::Error::Xml) with the line of the first invalid element.
    pub fn from_nccl_xml(text: &str) -> Result<Host> {
        xml::read(text)
    }

    /// NCCL's XML for this server. A server that was read from XML is written whole: the text that was read, unknown
    /// attributes and elements included, with what [`add_nvml`](Host::add_nvml) has changed. In any other, a PCIe
    /// switch is written as its upstream port, as NCCL has it.
    pub fn to_nccl_xml(&self) -> String {
        xml::write(self)
    }

    /// Adds names, numbers and NVLinks that NVML reports for this server's GPUs. An NVLink to any other device ends at
    /// a switch.
    pub fn add_nvml(&mut self, gpus: &[NvmlGpu]) {
        nvml::add(self, gpus);
    }

    /// The tree as text, a line for each device: NUMA nodes, GPUs and NICs with links.
    pub fn tree(&self) -> String {
        tree::text(self)
    }

    /// GPUs paired with NICs by the closest common ancestor; GPUs without a NIC share the nearest, evenly.
    pub fn pairing(&self) -> Pairing {
        pairs::pairing(self, &self.nics())
    }

    /// NICs for a rank with the GPU at this address, among the RDMA device ports that can be used. For example,
    /// a p5en rank has the two NICs under the GPU's PCIe switch.
    ///
    /// # Errors
    /// [`NoNicChoice`]: the rank uses all ports then.
    pub fn nics_of_gpu(
        &self,
        gpu: BusId,
        usable: &[RdmaPort],
    ) -> std::result::Result<NicChoice, NoNicChoice> {
        nic_choice::choose(self, gpu, usable)
    }

    /// Findings that cost bandwidth, worst first.
    pub fn lint(&self, assumptions: &Assumptions) -> Vec<Finding> {
        lint::lint(self, assumptions)
    }
}
