//! GPU names, numbers and NVLinks, from NVML.

use super::device::{BusId, DeviceKind};
use super::model::Host;
use super::nvlink::NvLink;
use serde::Deserialize;

/// A GPU as NVML describes it. The caller queries NVML; in Weft, the Python side does.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct NvmlGpu {
    /// The PCI address.
    pub bus_id: String,
    /// Index in NVML.
    pub index: u32,
    /// The product's name.
    #[serde(default)]
    pub name: Option<String>,
    /// The compute capability: 80.
    #[serde(default)]
    pub sm: Option<u32>,
    /// True if the GPU is partitioned into instances (MIG).
    #[serde(default)]
    pub mig: Option<bool>,
    /// PCI address at the far end of each active NVLink.
    #[serde(default)]
    pub nvlinks: Vec<String>,
}

/// Adds NVML's data to a server's GPUs. An NVLink to any other device ends at a switch.
pub(super) fn add(host: &mut Host, gpus: &[NvmlGpu]) {
    let known: Vec<BusId> =
        host.of_kind(DeviceKind::Gpu).map(|gpu| host.devices[gpu].bus_id).collect();
    for gpu in gpus {
        let Some(bus_id) = BusId::parse(&gpu.bus_id) else {
            host.notes
                .push(format!("NVML lists a GPU at {:?}: expected a PCI address", gpu.bus_id));
            continue;
        };
        let Some(device) = host.devices.iter_mut().find(|device| device.bus_id == bus_id) else {
            host.notes.push(format!("NVML lists a GPU at {bus_id}, where PCI has none"));
            continue;
        };
        device.gpu_index = Some(gpu.index);
        device.sm = gpu.sm.or(device.sm);
        device.mig = gpu.mig;
        device.name = gpu.name.clone().or(device.name.take());
        for target in gpu.nvlinks.iter().filter_map(|text| BusId::parse(text)) {
            let same = |link: &&mut NvLink| link.gpu == bus_id && link.target == target;
            match host.nvlinks.iter_mut().find(same) {
                Some(link) => link.count += 1,
                None => host.nvlinks.push(NvLink {
                    gpu: bus_id,
                    target,
                    count: 1,
                    to_switch: !known.contains(&target),
                }),
            }
        }
    }
}
