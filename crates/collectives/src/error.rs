//! What can go wrong, one variant per cause.

use crate::op::{Collective, Rank, Span};

/// Why a schedule was not built, not read, or not believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
        algorithm: String,
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
    /// Ranks do not divide evenly.
    #[error("{ranks} ranks are not a whole number of nodes of {local} ranks each")]
    Uneven {
        /// The number of ranks.
        ranks: u32,
        /// The ranks of each node.
        local: u32,
    },
    /// An operation's span is wrong in itself.
    #[error("rank {rank}, operation {index}: {span} {problem}")]
    Span {
        /// Whose operation.
        rank: Rank,
        /// Which.
        index: u32,
        /// The span.
        span: Span,
        /// What is wrong.
        problem: String,
    },
}
