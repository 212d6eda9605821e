//! Channel, plan and positions for a twin call.

use crate::device::abi::arguments::PlanLocation;
use crate::device::launch::config::LaunchConfig;
use crate::device::shape::DeviceShape;

/// Channel, plan and positions for a twin call.
#[derive(Clone, Copy, Debug)]
pub struct TwinLaunch {
    /// The channel.
    pub channel: u32,
    /// Plan location.
    pub plan: PlanLocation,
    /// Rows in position arrays; `None` for all that the shape has.
    pub positions: Option<u32>,
}

impl TwinLaunch {
    pub(crate) fn of(launch_config: LaunchConfig, shape: &DeviceShape) -> TwinLaunch {
        let positions = launch_config.positions.map(|rows| rows.min(shape.positions()));
        TwinLaunch { channel: launch_config.channel, plan: launch_config.plan, positions }
    }

    /// Rows in position arrays.
    pub(super) fn positions(&self, shape: &DeviceShape) -> u32 {
        self.positions.unwrap_or(shape.positions())
    }
}

impl From<u32> for TwinLaunch {
    fn from(channel: u32) -> TwinLaunch {
        TwinLaunch { channel, plan: PlanLocation::default(), positions: None }
    }
}
