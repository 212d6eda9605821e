//! Identifiers, links, events and usage reports.

use std::fmt;

/// Null index for jobs, links, hops and buckets.
pub(crate) const NONE: u32 = u32::MAX;

/// A directed link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bandwidth in bytes/s: finite, above 0.
    pub bandwidth: f64,
    /// Latency in seconds: finite, at least 0.
    pub latency: f64,
}

/// A link's number: the index in the argument to [`crate::Engine::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u32);

/// A path's number, from [`crate::Engine::add_path`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathId(pub u32);

/// A server's number, from [`crate::Engine::add_server`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServerId(pub u32);

/// The caller's job identifier, for example a rank number, returned in the event; opaque to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u64);

impl fmt::Display for Tag {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}

impl fmt::Display for LinkId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}

/// Job end: a flow has arrived, a service is done, or a timer has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// Job tag.
    pub tag: Tag,
}

/// Handle to a flow in flight; invalid once the flow has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowHandle {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// Link usage since time 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkUsage {
    /// Bytes carried, including bytes in flight.
    pub bytes: f64,
    /// Seconds with at least one flow on it, moving or stalled by a failed link.
    pub busy: f64,
    /// Maximum number of concurrent flows.
    pub most_flows: u32,
}
