//! What can go wrong, one variant per cause.

use crate::contention::Collision;
use crate::op::{Buffer, Collective, Op, Rank, Span};
use std::fmt;

/// Where in a schedule something is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// Whose operation.
    pub rank: Rank,
    /// Which of the rank's operations, from 0.
    pub index: u32,
    /// The operation.
    pub op: Op,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, operation {} ({}", self.rank, self.index, self.op)?;
        if let Op::Write { step, .. } = self.op {
            write!(f, ", step {step}")?;
        }
        f.write_str(")")
    }
}

/// Why a schedule was not built, not read, or not believed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number is outside what is possible.
    #[error("{what} is {value}; it must be from {least} to {most}")]
    OutOfRange {
        /// What the number is.
        what: &'static str,
        /// The number.
        value: u64,
        /// The least possible.
        least: u64,
        /// The most possible.
        most: u64,
    },
    /// The algorithm does not compute this collective.
    #[error("there is no {collective} by {algorithm}; there is {known}")]
    NoSuchAlgorithm {
        /// The collective.
        collective: Collective,
        /// The algorithm asked for.
        algorithm: &'static str,
        /// The algorithms that compute it.
        known: String,
    },
    /// The name is not that of an algorithm.
    #[error("there is no algorithm called {name:?}; there is {known}")]
    UnknownName {
        /// The name.
        name: String,
        /// All names.
        known: String,
    },
    /// Ranks do not make whole nodes, or blocks not whole shares.
    #[error("{whole} {what} cannot be shared evenly by {parts}")]
    Uneven {
        /// What is shared.
        what: &'static str,
        /// How many there are.
        whole: u32,
        /// Among how many.
        parts: u32,
    },
    /// JSON that is not a program.
    #[error("not a program: {0}")]
    Json(String),
    /// A schedule has too many operations or blocks to be stored.
    #[error("{what}: {needed}, at most {limit} allowed")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much.
        needed: u64,
        /// How much there may be.
        limit: u64,
    },
    /// A span does not lie within its buffer, or may not be used like this.
    #[error("{at}: {span} {problem}")]
    Span {
        /// The operation.
        at: At,
        /// The span.
        span: Span,
        /// What is wrong with it.
        problem: String,
    },
    /// A peer, a lane, a step or a count that cannot be.
    #[error("{at}: {problem}")]
    Operation {
        /// The operation.
        at: At,
        /// What is wrong with it.
        problem: String,
    },
    /// A write belongs to a step before that of something it depends on.
    #[error("{at}: rank {} has been at step {reached} before", at.rank)]
    StepOrder {
        /// The write.
        at: At,
        /// The step that has to come before, or be the same if it is the rank's own.
        reached: u32,
    },
    /// A block is read that nothing was written to.
    #[error("{at}: reads {block}, to which nothing has been written")]
    Unwritten {
        /// Who reads.
        at: At,
        /// What.
        block: Span,
    },
    /// A block is used while another operation may still be using it.
    #[error("{at}: {use_} {block} of rank {owner}, and nothing ensures that {other} has {done} it")]
    Race {
        /// The operation that comes too early.
        at: At,
        /// `reads`, `writes` or `overwrites`.
        use_: &'static str,
        /// Whose memory.
        owner: Rank,
        /// The block.
        block: Span,
        /// The operation that may not be over.
        other: Box<At>,
        /// `read` or `written`.
        done: &'static str,
    },
    /// A contribution is added a second time.
    #[error("{at}: adds rank {contributor}'s block {block} a second time")]
    Twice {
        /// The addition.
        at: At,
        /// Whose contribution.
        contributor: Rank,
        /// Which block of the vector.
        block: u32,
    },
    /// A block of the vector comes where another belongs.
    #[error("{at}: brings block {found} of the vector to {place}, where block {expected} belongs")]
    WrongBlock {
        /// The operation.
        at: At,
        /// Where to.
        place: Span,
        /// The block that it brings.
        found: u32,
        /// The block that belongs there.
        expected: u32,
    },
    /// A wait may count a write that it does not mean.
    #[error("{at}: may also be satisfied by a later write: {write}")]
    Ambiguous {
        /// The wait.
        at: At,
        /// The write that may arrive before those that were meant.
        write: Box<At>,
    },
    /// A wait never ends.
    #[error("{at}: waits for ever: {risen} of {count} writes are posted, and rank {from} {}",
        match .peer {
            Some(peer) => format!("waits itself: {peer}"),
            None => "has nothing left to do".to_owned(),
        })]
    Deadlock {
        /// The wait.
        at: At,
        /// For whom.
        from: Rank,
        /// How many writes were posted on the lane.
        risen: u32,
        /// For how many it waits.
        count: u32,
        /// Where that rank waits itself.
        peer: Option<Box<At>>,
    },
    /// Nobody waits for a write.
    #[error("{write}: rank {to} does not wait for it")]
    Unwaited {
        /// The write.
        write: At,
        /// Who should wait.
        to: Rank,
    },
    /// A block of the output is not what the collective asks for.
    #[error("rank {rank}: in the end {block} {problem}")]
    Result {
        /// Whose output.
        rank: Rank,
        /// Which block of it.
        block: Span,
        /// What is wrong with it.
        problem: String,
    },
    /// The map from ranks to endpoints does not fit.
    #[error("the rank map {0}")]
    RankMap(String),
    /// Two endpoints are in the same half of a BiGraph, and have as many paths as the other has switches.
    #[error("{from} and {to} are in one half of the BiGraph: there is no unique path")]
    NotUnique {
        /// The endpoint that sends.
        from: String,
        /// The endpoint that receives.
        to: String,
    },
    /// Writes of one step share a link.
    #[error("{count} times a link is shared in a step; {first}")]
    Contention {
        /// How often.
        count: u64,
        /// The first.
        first: Box<Collision>,
    },
    /// A cost that cannot be.
    #[error("the cost {what} is {value}; it must be finite, and {}",
        if *what == "add_bytes_per_s" { "above 0" } else { "not negative" })]
    Cost {
        /// Which of [`Costs`](crate::tune::Costs).
        what: &'static str,
        /// What it is.
        value: f64,
    },
    /// No algorithm could be weighed.
    #[error("no algorithm can be chosen: {0}")]
    NothingToChoose(String),
    /// The network has no such path.
    #[error(transparent)]
    Topology(#[from] weft_topology::Error),
}

/// Refuses a number that is out of range.
pub(crate) fn in_range(what: &'static str, value: u32, least: u32, most: u32) -> Result<(), Error> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::OutOfRange { what, value: value.into(), least: least.into(), most: most.into() })
}

/// Refuses more than `limit`.
pub(crate) fn at_most(what: &'static str, needed: u64, limit: u64) -> Result<(), Error> {
    if needed > limit {
        return Err(Error::TooLarge { what, needed, limit });
    }
    Ok(())
}

/// One block, as a span.
pub(crate) fn block(buffer: Buffer, first: u32) -> Span {
    Span { buffer, first, blocks: 1 }
}
