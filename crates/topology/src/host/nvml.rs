//! What NVML adds: names, numbers and NVLinks of GPUs.

use super::model::{BusId, DeviceKind, Host};
use super::nvlink::NvLink;
use serde::Deserialize;

/// A GPU as NVML describes it. Who asks NVML is not this crate's business: the Python side loads it where it
/// is present.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct NvmlGpu {
    /// The PCI address.
    pub bus_id: String,
    /// NVML's number.
    pub index: u32,
    /// The product's name.
    #[serde(default)]
    pub name: Option<String>,
    /// The compute capability: 80.
    #[serde(default)]
    pub sm: Option<u32>,
    /// Whether it is cut into instances.
    #[serde(default)]
    pub mig: Option<bool>,
    /// The PCI address of what each active NVLink leads to.
    #[serde(default)]
    pub nvlinks: Vec<String>,
}

impl Host {
    /// Adds what NVML says of the GPUs that were found. An NVLink to what is not one of them leads to a switch.
    pub fn add_nvml(&mut self, gpus: &[NvmlGpu]) {
        let known: Vec<BusId> =
            self.of_kind(DeviceKind::Gpu).map(|gpu| self.devices[gpu].bus_id).collect();
        for gpu in gpus {
            let Some(bus_id) = BusId::parse(&gpu.bus_id) else {
                self.notes.push(format!("NVML names a GPU {:?}, which is no address", gpu.bus_id));
                continue;
            };
            let Some(device) = self.devices.iter_mut().find(|device| device.bus_id == bus_id)
            else {
                self.notes.push(format!("NVML has a GPU at {bus_id}, where PCI has none"));
                continue;
            };
            device.gpu_index = Some(gpu.index);
            device.sm = gpu.sm.or(device.sm);
            device.mig = gpu.mig;
            device.name = gpu.name.clone().or(device.name.take());
            for target in gpu.nvlinks.iter().filter_map(|text| BusId::parse(text)) {
                let same = |link: &&mut NvLink| link.gpu == bus_id && link.target == target;
                match self.nvlinks.iter_mut().find(same) {
                    Some(link) => link.count += 1,
                    None => self.nvlinks.push(NvLink {
                        gpu: bus_id,
                        target,
                        count: 1,
                        to_switch: !known.contains(&target),
                    }),
                }
            }
        }
    }
}
