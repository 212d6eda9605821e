//! Schedule errors, one variant per cause.

use crate::collision::Collision;
use crate::op::{Collective, OpLocation, Rank, Span};

/// Failure to build, parse, verify or estimate a schedule.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Number out of range.
    #[error("{what} is {value}: expected {least} to {most}")]
    OutOfRange {
        /// Counted quantity, for example `the number of chunks`.
        what: &'static str,
        /// Number.
        value: u64,
        /// Smallest valid number.
        least: u64,
        /// Largest valid number.
        most: u64,
    },
    /// Collective that the algorithm does not compute.
    #[error("{algorithm} does not compute {collective}: use one of {known}")]
    NoSuchAlgorithm {
        /// Collective.
        collective: Collective,
        /// Requested algorithm.
        algorithm: &'static str,
        /// Algorithms that compute the collective.
        known: String,
    },
    /// Unknown algorithm.
    #[error("algorithm {name:?} is unknown: use one of {known}")]
    UnknownName {
        /// Name.
        name: String,
        /// All names.
        known: String,
    },
    /// Number that is not a required multiple, for example 6 ranks with 4 per node.
    #[error("{whole} {what}: expected a multiple of {parts}")]
    Uneven {
        /// Counted quantity, for example `the number of chunks`.
        what: &'static str,
        /// Number.
        whole: u32,
        /// Required divisor.
        parts: u32,
    },
    /// Invalid program JSON.
    #[error("not a program: {0}")]
    Json(String),
    /// Size beyond a limit.
    #[error("{what}: {needed}, at most {limit} allowed")]
    TooLarge {
        /// Measured quantity, for example `bytes of JSON`.
        what: &'static str,
        /// Size.
        needed: u64,
        /// Limit.
        limit: u64,
    },
    /// Span outside the buffer, or with an invalid use.
    #[error("{at}: {span} {problem}")]
    Span {
        /// Operation.
        at: OpLocation,
        /// Span.
        span: Span,
        /// Problem text.
        problem: String,
    },
    /// Invalid peer, lane, step or count.
    #[error("{at}: {problem}")]
    Operation {
        /// Operation.
        at: OpLocation,
        /// Problem text, for example `its peer is the rank itself`.
        problem: String,
    },
    /// Write with an earlier step than a write that it depends on.
    #[error("{at}: rank {} has completed step {reached}", at.rank)]
    StepOrder {
        /// Write.
        at: OpLocation,
        /// Last step that the rank has completed.
        reached: u32,
    },
    /// Read from an unwritten block.
    #[error("{at}: reads {block}, which is unwritten")]
    Unwritten {
        /// Reading operation.
        at: OpLocation,
        /// Block.
        block: Span,
    },
    /// Block use that is not ordered after a conflicting use.
    #[error("{at}: {use_} {block} of rank {owner} without waiting until {other} has {done} it")]
    Race {
        /// Operation that may start too early.
        at: OpLocation,
        /// `reads`, `writes` or `overwrites`.
        use_: &'static str,
        /// Block owner.
        owner: Rank,
        /// Block.
        block: Span,
        /// Operation that may not have ended.
        other: Box<OpLocation>,
        /// `read` or `written`.
        done: &'static str,
    },
    /// Contribution added twice.
    #[error("{at}: adds rank {contributor}'s block {block} a second time")]
    Twice {
        /// Addition.
        at: OpLocation,
        /// Rank that contributed.
        contributor: Rank,
        /// Vector block.
        block: u32,
    },
    /// Vector block at another block's position.
    #[error(
        "{at}: writes block {found} of the vector to {place}, the position of block {expected}"
    )]
    WrongBlock {
        /// Operation.
        at: OpLocation,
        /// Target block.
        place: Span,
        /// Vector block that it writes.
        found: u32,
        /// Vector block for that position.
        expected: u32,
    },
    /// Wait that may count another write than intended.
    #[error("{at}: may also be satisfied by a later write: {write}")]
    Ambiguous {
        /// Wait.
        at: OpLocation,
        /// Later write that may arrive before the intended ones.
        write: Box<OpLocation>,
    },
    /// Wait that never ends.
    #[error("{at}: never ends: {risen} of {count} writes are posted, and rank {from} {}",
        match .peer {
            Some(peer) => format!("waits itself: {peer}"),
            None => "has no operations left".to_owned(),
        })]
    Deadlock {
        /// Wait.
        at: OpLocation,
        /// Rank that it waits for.
        from: Rank,
        /// Writes posted on the lane.
        risen: u32,
        /// Writes that it waits for.
        count: u32,
        /// Wait in which that rank blocks, if any.
        peer: Option<Box<OpLocation>>,
    },
    /// Write without a wait.
    #[error("{write}: rank {to} does not wait for it")]
    Unwaited {
        /// Write.
        write: OpLocation,
        /// Destination, which should wait.
        to: Rank,
    },
    /// Wrong block in the final output.
    #[error("rank {rank}: final {block} {problem}")]
    Result {
        /// Output rank.
        rank: Rank,
        /// Output block.
        block: Span,
        /// Problem text.
        problem: String,
    },
    /// Invalid rank placement.
    #[error("the rank placement {0}")]
    RankPlacement(String),
    /// Two endpoints in one BiGraph half, which have a path through each switch in the other half.
    #[error("{from} and {to} are in one half of the BiGraph: there is no unique path")]
    NoUniquePath {
        /// Source endpoint.
        from: String,
        /// Destination endpoint.
        to: String,
    },
    /// Contention: writes in one step share a link.
    #[error("{count} collisions; the first: {first}")]
    Contention {
        /// Collision count.
        count: u64,
        /// First collision.
        first: Box<Collision>,
    },
    /// Invalid cost.
    #[error("the cost {what} is {value}: expected a finite number {}",
        if *what == "add_bytes_per_s" { "above 0" } else { "of at least 0" })]
    InvalidCost {
        /// Field in [`Costs`](crate::tune::Costs).
        what: &'static str,
        /// Value.
        value: f64,
    },
    /// No algorithm could be estimated.
    #[error("no algorithm can be chosen: {0}")]
    NoCandidate(String),
    /// Network error, such as a missing path.
    #[error(transparent)]
    Topology(#[from] weft_topology::Error),
}

/// Rejects a number out of range.
pub(crate) fn in_range(what: &'static str, value: u32, least: u32, most: u32) -> Result<(), Error> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::OutOfRange { what, value: value.into(), least: least.into(), most: most.into() })
}

/// Rejects a size beyond `limit`.
pub(crate) fn at_most(what: &'static str, needed: u64, limit: u64) -> Result<(), Error> {
    if needed > limit {
        return Err(Error::TooLarge { what, needed, limit });
    }
    Ok(())
}
