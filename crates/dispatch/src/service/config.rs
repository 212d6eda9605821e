//! Configuration of services.

use std::time::Duration;

/// Sizes and waits of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceConfig {
    /// Submissions that wait for the service's thread, rounded up to a power of two.
    pub submissions: usize,
    /// Time without work in which the thread polls without a pause. Zero where its core has other work.
    pub spin: Duration,
    /// Further polls, with a yield of the core before each, after which the thread sleeps.
    pub yields: u32,
    /// Most bytes that a front end reserves for the slots of one node, whose schema comes from the node.
    pub max_slot_bytes: u64,
    /// NUMA node of the memory of slots; `None`: that of the thread that uses a page first.
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
