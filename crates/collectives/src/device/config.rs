//! Device collectives configuration.

use std::time::Duration;
use weft_gpu::MemoryLocation;

/// A rank's device collectives configuration. All but `location` is equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct DeviceConfig {
    /// Device, or the CPU for a twin.
    pub location: MemoryLocation,
    /// Maximum SM count per call; by default [`DeviceConfig::usual_sms`], or fewer if ranks share a GPU.
    pub num_sms: Option<u32>,
    /// Timeout for a wait on the device for a peer.
    pub skew_timeout: Duration,
    /// True if calls may be in flight together with calls by other operators.
    pub concurrent: bool,
    /// Default for [`CallOptions::copy_engine`](super::CallOptions::copy_engine), for the caller.
    pub copy_engine: bool,
}

impl DeviceConfig {
    /// Default block count for a twin.
    pub const TWIN_BLOCKS: u32 = 2;

    /// Default SM count per call. Among four ranks, each further SM makes long messages faster; between two it does
    /// not; for more than eight ranks the memory is not doubled for it.
    pub const fn usual_sms(ranks: u32) -> u32 {
        match ranks {
            3..=8 => 64,
            _ => 32,
        }
    }
}
