//! Configuration of device collectives.

use std::time::Duration;
use weft_gpu::MemoryLocation;

/// Configuration of a rank's device collectives. All but `location` is equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct DeviceConfig {
    /// Device, or the CPU for a twin.
    pub location: MemoryLocation,
    /// Largest number of multiprocessors of a call; by default [`DeviceConfig::USUAL_SMS`], or fewer if ranks share a GPU.
    pub num_sms: Option<u32>,
    /// Limit of a wait for a peer on the device.
    pub skew_timeout: Duration,
    /// True if calls may be in flight together with those of other operators.
    pub concurrent: bool,
}

impl DeviceConfig {
    /// Multiprocessors of a call by default.
    pub const USUAL_SMS: u32 = 32;
    /// Blocks of a twin by default.
    pub const TWIN_BLOCKS: u32 = 2;
}
