//! Launch configuration of a call: stream, channel, multiprocessors and plan.

use crate::device::abi::arguments::PlanLocation;
use weft_cuda::Stream;

/// Launch configuration of a call.
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    /// Stream of this rank's device; unused by the twin.
    pub stream: Stream,
    /// The channel.
    pub channel: u32,
    /// Maximum number of streaming multiprocessors of its launches, at most that of the all-to-all; `None`
    /// for that of the all-to-all.
    pub num_sms: Option<u32>,
    /// Location of the plan of the round.
    pub plan: PlanLocation,
    /// Rows of the arrays of positions: those that dispatch writes, and the outputs that combine reads.
    /// `None` for [`DeviceShape::positions`](crate::device::DeviceShape::positions).
    pub positions: Option<u32>,
}

impl LaunchConfig {
    /// A configuration with the defaults of the all-to-all.
    pub fn new(stream: Stream, channel: u32) -> LaunchConfig {
        LaunchConfig {
            stream,
            channel,
            num_sms: None,
            plan: PlanLocation::default(),
            positions: None,
        }
    }
}
