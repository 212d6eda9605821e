//! NVLinks and the GPUs that they join.

use super::device::BusId;
use serde::Serialize;
use std::collections::HashSet;

/// NVLinks from a GPU to another GPU or to an NVSwitch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct NvLink {
    /// The GPU.
    pub gpu: BusId,
    /// The other GPU, or an NVSwitch.
    pub target: BusId,
    /// Links between them.
    pub count: u32,
    /// True if the target is a switch; switches join all GPUs with links to switches.
    pub to_switch: bool,
}

/// GPU pairs joined by NVLink, directly or by switches.
#[derive(Clone, Debug)]
pub struct NvLinkMap {
    /// Assumption that all GPUs are joined: there are switches, but the links are unknown.
    all: bool,
    switched: HashSet<BusId>,
    direct: HashSet<(BusId, BusId)>,
}

impl NvLinkMap {
    /// From a server's NVLinks and NVSwitch count.
    pub(super) fn new(nvlinks: &[NvLink], nvswitches: u32) -> NvLinkMap {
        let switched = nvlinks.iter().filter(|link| link.to_switch);
        NvLinkMap {
            all: nvlinks.is_empty() && nvswitches > 0,
            switched: switched.map(|link| link.gpu).collect(),
            direct: nvlinks.iter().map(|link| (link.gpu, link.target)).collect(),
        }
    }

    /// True if the two GPUs are joined.
    pub fn joins(&self, one: BusId, other: BusId) -> bool {
        let switched = |gpu| self.switched.contains(gpu);
        let direct = |one, other| self.direct.contains(&(one, other));
        self.all || (switched(&one) && switched(&other)) || direct(one, other) || direct(other, one)
    }
}
