//! Crate errors, one variant per cause.

use crate::types::{LinkId, Tag};

/// Result type for engine calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Engine error. A failed call leaves the engine unchanged.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Bandwidth out of range.
    #[error("bandwidth {bandwidth} bytes/s of link {link}: expected a finite number above 0")]
    Bandwidth {
        /// The link.
        link: LinkId,
        /// Given bandwidth.
        bandwidth: f64,
    },
    /// Latency out of range.
    #[error("latency {latency} s of link {link}: expected a finite number of at least 0")]
    Latency {
        /// The link.
        link: LinkId,
        /// Given latency.
        latency: f64,
    },
    /// Count above what its numbers can hold.
    #[error("too many {what}: expected at most {most}")]
    TooMany {
        /// Counted items.
        what: &'static str,
        /// Limit.
        most: u64,
    },
    /// Link number out of range.
    #[error("link {link}: expected a number below {links}, the number of links")]
    UnknownLink {
        /// The number.
        link: LinkId,
        /// Link count.
        links: u32,
    },
    /// Path number out of range.
    #[error("path {path}: expected a number below {paths}, the number of paths added")]
    UnknownPath {
        /// The number.
        path: u32,
        /// Path count.
        paths: u32,
    },
    /// Server number out of range.
    #[error("server {server}: expected a number below {servers}, the number of servers added")]
    UnknownServer {
        /// The number.
        server: u32,
        /// Server count.
        servers: u32,
    },
    /// Path with a repeated link.
    #[error("link {link} is hop {first} and hop {second} of one path: a routing loop")]
    Loop {
        /// The link.
        link: LinkId,
        /// First hop, counted from 0.
        first: usize,
        /// Second hop.
        second: usize,
    },
    /// Duration out of range.
    #[error("{what} {seconds} s of {tag}: expected a finite number of at least 0")]
    Duration {
        /// Duration kind.
        what: &'static str,
        /// The job.
        tag: Tag,
        /// The duration.
        seconds: f64,
    },
    /// Job whose end is not finite.
    #[error("{tag} would end at {time} s: expected a finite time")]
    Time {
        /// The job.
        tag: Tag,
        /// End time.
        time: f64,
    },
    /// Time to advance to that is past or not finite.
    #[error("cannot advance to {to} s: expected a finite time of at least {now} s, the present")]
    Past {
        /// Present time.
        now: f64,
        /// Requested time.
        to: f64,
    },
    /// Flows stalled by failed links, with no other job left.
    #[error("flow {tag} is stalled at {time} s: link {link} has failed ({flows} stalled in all)")]
    Stalled {
        /// Stalled flow with the lowest slot.
        tag: Tag,
        /// A failed link on the path.
        link: LinkId,
        /// Stalled flow count.
        flows: u32,
        /// Present time.
        time: f64,
    },
    /// Time without progress: jobs that end at an instant start jobs that end at the same instant.
    #[error(
        "no progress at {time} s: {instants} jobs of no duration ended there in sequence, the last was {tag}"
    )]
    NoProgress {
        /// The instant.
        time: f64,
        /// Instant count.
        instants: u64,
        /// Last job that ended.
        tag: Tag,
    },
}
