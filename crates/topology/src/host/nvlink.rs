//! NVLinks, and whom they join.

use super::model::{BusId, Host};
use serde::Serialize;
use std::collections::HashSet;

/// NVLinks from a GPU to another or to a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct NvLink {
    /// The GPU.
    pub gpu: BusId,
    /// The other GPU, or an NVSwitch.
    pub target: BusId,
    /// Links between them.
    pub count: u32,
    /// Whether the target is a switch, which joins all GPUs that have links to switches.
    pub to_switch: bool,
}

/// Which GPUs NVLink joins, directly or by switches.
#[derive(Clone, Debug)]
pub struct NvLinked {
    /// All of them, it is guessed: there are switches, and nobody said what hangs on them.
    all: bool,
    switched: HashSet<BusId>,
    direct: HashSet<(BusId, BusId)>,
}

impl NvLinked {
    /// Whether it joins these two.
    pub fn joins(&self, one: BusId, other: BusId) -> bool {
        let switched = |gpu| self.switched.contains(gpu);
        let direct = |one, other| self.direct.contains(&(one, other));
        self.all || (switched(&one) && switched(&other)) || direct(one, other) || direct(other, one)
    }
}

impl Host {
    /// Which GPUs NVLink joins.
    pub fn nvlinked(&self) -> NvLinked {
        let switched = self.nvlinks.iter().filter(|link| link.to_switch);
        NvLinked {
            all: self.nvlinks.is_empty() && self.nvswitches > 0,
            switched: switched.map(|link| link.gpu).collect(),
            direct: self.nvlinks.iter().map(|link| (link.gpu, link.target)).collect(),
        }
    }
}
