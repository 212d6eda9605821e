//! Service configuration.

use std::time::Duration;

/// Service sizes and waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceConfig {
    /// Submissions that wait for the service thread, rounded up to a power of two, so 1000 makes room
    /// for 1024.
    pub submissions: usize,
    /// Idle time in which the thread polls without a pause. Zero where the core has other work.
    pub spin: Duration,
    /// Further polls, each after a core yield, before the thread sleeps.
    pub yields: u32,
    /// Maximum bytes that a front end reserves for one node's slots; the schema comes from the node.
    pub max_slot_bytes: u64,
    /// NUMA node for slot memory; `None`: first touch decides.
    pub numa_node: Option<u32>,
}

impl Default for ServiceConfig {
    fn default() -> ServiceConfig {
        ServiceConfig {
            submissions: 4096,
            spin: Duration::ZERO,
            yields: 20,
            max_slot_bytes: 1 << 30,
            numa_node: None,
        }
    }
}
