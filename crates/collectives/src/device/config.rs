//! Configuration of device collectives.

use std::time::Duration;
use weft_gpu::MemoryLocation;

/// Configuration of a rank's device collectives. All but `location` is equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct DeviceConfig {
    /// Device, or the CPU for a twin.
    pub location: MemoryLocation,
    /// Largest number of multiprocessors of a call; by default [`DeviceConfig::usual_sms`], or fewer if ranks share a GPU.
    pub num_sms: Option<u32>,
    /// Limit of a wait for a peer on the device.
    pub skew_timeout: Duration,
    /// True if calls may be in flight together with those of other operators.
    pub concurrent: bool,
    /// Default of [`CallOptions::copy_engine`](super::CallOptions::copy_engine), for the caller.
    pub copy_engine: bool,
}

impl DeviceConfig {
    /// Blocks of a twin by default.
    pub const TWIN_BLOCKS: u32 = 2;

    /// Multiprocessors of a call by default. Long messages of four ranks are faster with each further one, those of two
    /// are not; the memory of more than eight ranks is not doubled for them.
    pub const fn usual_sms(ranks: u32) -> u32 {
        match ranks {
            3..=8 => 64,
            _ => 32,
        }
    }
}
