//! What can go wrong, one variant per cause.

use crate::types::{LinkId, Tag};

/// The result of a call of the engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the engine. A call that gives one has changed nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A link's bandwidth is not a number greater than zero.
    #[error(
        "link {link} has a bandwidth of {bandwidth} bytes/s; it must be finite and greater than zero"
    )]
    Bandwidth {
        /// The link.
        link: LinkId,
        /// Its bandwidth.
        bandwidth: f64,
    },
    /// A link's latency is not a number of seconds.
    #[error("link {link} has a latency of {latency} s; it must be finite and zero or more")]
    Latency {
        /// The link.
        link: LinkId,
        /// Its latency.
        latency: f64,
    },
    /// There are more of something than can be numbered.
    #[error("there are too many {what}: at most {most} can be numbered")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there may be.
        most: u64,
    },
    /// There is no link of that number.
    #[error("there is no link {link}: there are {links}, numbered from 0")]
    UnknownLink {
        /// The number.
        link: LinkId,
        /// How many links there are.
        links: u32,
    },
    /// There is no path of that number.
    #[error("there is no path {path}: {paths} have been added, numbered from 0")]
    UnknownPath {
        /// The number.
        path: u32,
        /// How many paths there are.
        paths: u32,
    },
    /// There is no server of that number.
    #[error("there is no server {server}: {servers} have been added, numbered from 0")]
    UnknownServer {
        /// The number.
        server: u32,
        /// How many servers there are.
        servers: u32,
    },
    /// A path comes over the same link twice.
    #[error("the path comes over link {link} twice, as hops {first} and {second}: a routing loop")]
    Loop {
        /// The link.
        link: LinkId,
        /// The hop that is it first, counted from 0.
        first: usize,
        /// The hop that is it again.
        second: usize,
    },
    /// A duration is not a number of seconds.
    #[error("the {what} of {tag} is {seconds} s; it must be finite and zero or more")]
    Duration {
        /// What lasts so long.
        what: &'static str,
        /// Of what.
        tag: Tag,
        /// How long.
        seconds: f64,
    },
    /// Something would happen at a time that cannot be named.
    #[error("{tag} would end at {time} s: the times of a simulation must be finite")]
    Time {
        /// What would.
        tag: Tag,
        /// When.
        time: f64,
    },
    /// A time that is over, or no time at all, was asked for.
    #[error("it is {now} s: the simulation cannot go to {to} s")]
    Past {
        /// The time.
        now: f64,
        /// The time that was asked for.
        to: f64,
    },
    /// Flows are left that can never end, and nothing else will happen.
    #[error("flow {tag} is stalled for ever at {time} s: link {link} has failed ({flows} {} in all)", if *.flows == 1 { "flow waits" } else { "flows wait" })]
    Stalled {
        /// The flow that was started first.
        tag: Tag,
        /// The failed link that it needs.
        link: LinkId,
        /// How many flows are left in all.
        flows: u32,
        /// The time since which nothing moves.
        time: f64,
    },
    /// Time has stopped: what ends at an instant starts something that ends at the same instant, for ever.
    #[error(
        "time does not go on from {time} s: {instants} times running something that takes no time has ended there, the last was {tag}"
    )]
    NoProgress {
        /// The instant.
        time: f64,
        /// How often.
        instants: u64,
        /// What ended there last.
        tag: Tag,
    },
}
