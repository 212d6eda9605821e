//! Front end reports.

use super::link::Source;
use crate::ledger::{Failure, NodeId, QueryId};
use weft_fabric::Time;

/// Answer, in the memory into which the node wrote it.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    node: NodeId,
    source: Source<'a>,
}

impl<'a> Answer<'a> {
    pub(super) fn new(node: NodeId, source: Source<'a>) -> Answer<'a> {
        Answer { node, source }
    }

    /// Node that answered.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Bytes per tensor, in schema order.
    pub fn tensors(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let source = self.source;
        (0..source.len()).map(move |tensor| source.tensor(tensor))
    }
}

/// Tokens in a partial answer, in the memory into which the node wrote them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens<'a> {
    /// Node that answers.
    pub node: NodeId,
    /// Number of tokens reported before.
    pub from: u32,
    /// Number of tokens so far.
    pub to: u32,
    /// Arrival time of the last token.
    pub at: Time,
    /// Number of times that the query was sent. If this has risen since an earlier report, a node was lost and the
    /// stream began anew: tokens in earlier reports are void.
    pub sends: u32,
    /// Bytes of tokens `from` to `to - 1`, readable until the next call.
    pub bytes: &'a [u8],
}

/// Report on a query. Each query has exactly one [`Report::Answered`] or [`Report::Failed`].
#[derive(Clone, Copy, Debug)]
pub enum Report<'a> {
    /// An answer's first tokens have arrived. With a token output, this precedes each answer that has any.
    FirstToken {
        /// Query.
        query: QueryId,
        /// Submission token.
        token: u64,
        /// Tokens.
        tokens: Tokens<'a>,
    },
    /// Further tokens have arrived. An answer's tokens are all reported before it.
    Tokens {
        /// Query.
        query: QueryId,
        /// Submission token.
        token: u64,
        /// Tokens.
        tokens: Tokens<'a>,
    },
    /// The query was answered; its memory may be reused.
    Answered {
        /// Query; the id is stale from the next call on.
        query: QueryId,
        /// Submission token.
        token: u64,
        /// Answer, readable until the next call.
        answer: Answer<'a>,
    },
    /// The query has ended without an answer.
    Failed {
        /// Query.
        query: QueryId,
        /// Submission token.
        token: u64,
        /// Cause.
        failure: Failure,
        /// True while the query's memory may still be read: [`Report::Returned`] follows.
        quarantined: bool,
    },
    /// A failed query's memory may be reused.
    Returned {
        /// Query; the id is stale.
        query: QueryId,
        /// Submission token.
        token: u64,
    },
}

impl Report<'_> {
    /// The query's submission token.
    pub fn token(&self) -> u64 {
        match self {
            Report::FirstToken { token, .. }
            | Report::Tokens { token, .. }
            | Report::Answered { token, .. }
            | Report::Failed { token, .. }
            | Report::Returned { token, .. } => *token,
        }
    }

    /// True if the query's memory may be reused.
    pub fn is_last(&self) -> bool {
        !matches!(
            self,
            Report::Failed { quarantined: true, .. }
                | Report::FirstToken { .. }
                | Report::Tokens { .. }
        )
    }
}
