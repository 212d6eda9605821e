//! NIC and post counters.

/// NIC counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TwinStatistics {
    /// Completions for which a queue had no entry.
    pub overflows: u64,
    /// Packets without an acknowledgement.
    pub lost_packets: u64,
    /// Work requests posted.
    pub requests: u64,
    /// Contexts, domains, registrations, queues and queue pairs that are not destroyed.
    pub live_objects: usize,
    /// Live registrations, and the bytes that they cover.
    pub registered: (usize, u64),
    /// Regions paged on demand, and how many bytes in them were prefetched.
    pub paged: (usize, u64),
    /// Length and highest fill for each completion queue.
    pub queues: Vec<(usize, usize)>,
}

/// Work request chains that one post each has accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TwinChains {
    /// Those that write bytes.
    pub data: u64,
    /// Chains that are an empty write: credits, consumption reports, greetings, farewells.
    pub signals: u64,
}
