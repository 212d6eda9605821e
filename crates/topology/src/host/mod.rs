//! A server: its GPUs, its NICs, and the PCIe tree that they hang on.

mod lint;
mod model;
mod nvlink;
mod nvml;
mod pairs;
mod shares;
mod sysfs;
mod tree;
mod xml;

pub use lint::{Finding, Severity};
pub use model::{BusId, Device, DeviceKind, Distance, Host, Interface, PcieLink};
pub use nvlink::{NvLink, NvLinked};
pub use nvml::NvmlGpu;
pub use pairs::{Pair, Pairing};
pub use shares::Assumptions;
