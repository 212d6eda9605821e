//! Engine limits and timeouts.

use std::time::Duration;

/// Engine limits and timeouts.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Lanes in the table: two for each counter and peer, more for windows longer than one round. For
    /// example, one counter toward 7 peers needs 14 lanes. An issued lane takes 32 bytes of shared
    /// memory.
    pub lanes: usize,
    /// Limit for requests in flight; more are rejected with [`crate::Error::Limit`].
    pub max_requests: usize,
    /// Time that a broken connection waits for the control plane's report that the peer has left;
    /// afterwards the peer counts as lost.
    pub loss_grace: Duration,
    /// Requests and events for which memory is reserved; more are allocated on demand.
    pub reserved: usize,
    /// Trace records kept for each kind; zero turns the trace off.
    pub trace_limit: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            lanes: 65_536,
            max_requests: 65_536,
            loss_grace: Duration::from_secs(1),
            reserved: 1024,
            trace_limit: 0,
        }
    }
}

impl EngineConfig {
    /// Limits for a pair: 256 lanes and 8 for staging slots in 9 KiB, memory for 16 requests. A process may
    /// have thousands of pairs.
    pub fn for_pair() -> EngineConfig {
        EngineConfig { lanes: 264, max_requests: 4096, reserved: 16, ..EngineConfig::default() }
    }
}
