//! Identities, links, and what the engine says of them.

use std::fmt;

/// No job, link, hop or bucket.
pub(crate) const NONE: u32 = u32::MAX;

/// A directed link: what it carries in a second, and how long a byte takes to cross it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes a second: finite and greater than zero.
    pub bandwidth: f64,
    /// Seconds: finite, and zero or more.
    pub latency: f64,
}

/// A link's number: its place in the list that [`crate::Engine::new`] was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u32);

/// A path's number, from [`crate::Engine::add_path`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathId(pub u32);

/// A server's number, from [`crate::Engine::add_server`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServerId(pub u32);

/// The caller's name for a piece of work. The engine gives it back and does not look into it.
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

/// Something has ended: a flow has arrived, a service is done, a timer has run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// What it was started with.
    pub tag: Tag,
}

/// A flow under way, to cancel it. It names nothing once the flow has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowHandle {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// What a link has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkUsage {
    /// Bytes carried, those of flows still under way included.
    pub bytes: f64,
    /// Seconds during which at least one flow was moving bytes over it, or waiting to on a failed link.
    pub busy: f64,
    /// The most flows that shared it at one time.
    pub most_flows: u32,
}
