//! Launch configuration for a call: stream, channel, SMs and plan.

use crate::device::abi::arguments::PlanLocation;
use weft_cuda::Stream;

/// Launch configuration for a call.
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    /// Stream on this rank's device; unused by the twin.
    pub stream: Stream,
    /// The channel.
    pub channel: u32,
    /// Maximum number of SMs for the launches, at most the all-to-all's limit; `None` for that limit. For
    /// example, `Some(16)` leaves the other SMs to a GEMM.
    pub num_sms: Option<u32>,
    /// Location of the round's plan.
    pub plan: PlanLocation,
    /// Rows in position arrays: those that dispatch writes, and the outputs that combine reads. `None` for
    /// [`DeviceShape::positions`](crate::device::DeviceShape::positions).
    pub positions: Option<u32>,
}

impl LaunchConfig {
    /// A configuration with the all-to-all's defaults.
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
