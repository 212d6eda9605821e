//! Ledger ids, outcomes and configuration.

use super::policy::Policy;
use std::fmt;
use weft_fabric::Time;

/// Query in progress: ledger index, and how often that index was reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueryId {
    pub(super) index: u32,
    pub(super) reuse: u32,
}

/// Present node: ledger place, and how often that place was reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId {
    pub(super) place: u32,
    pub(super) reuse: u32,
}

impl QueryId {
    /// Id in reports on queries that ended before a ledger accepted them.
    pub const UNACCEPTED: QueryId = QueryId { index: u32::MAX, reuse: 0 };

    /// Index in the ledger, below [`LedgerConfig::queries`].
    pub fn index(self) -> usize {
        self.index as usize
    }
}

impl NodeId {
    /// Place in the ledger, below [`LedgerConfig::nodes`].
    pub fn place(self) -> usize {
        self.place as usize
    }
}

impl fmt::Display for QueryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.reuse)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.place, self.reuse)
    }
}

/// Ledger sizes and rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LedgerConfig {
    /// Queries in progress, from submission until the memory returns; at least 1.
    pub queries: u32,
    /// Nodes at a time; at least 1.
    pub nodes: u32,
    /// Maximum slots per node; at least 1.
    pub slots: u32,
    /// Number of quarantined slots at which a node takes no more queries; at least 1.
    pub max_quarantined: u32,
    /// Number of times that a query may be sent, after node losses; at least 1. With 1, no query is executed twice;
    /// with 3, for example, a query survives two node losses.
    pub max_sends: u32,
    /// Node selection.
    pub policy: Policy,
}

impl Default for LedgerConfig {
    fn default() -> LedgerConfig {
        LedgerConfig {
            queries: 8192,
            nodes: 16,
            slots: 8192,
            max_quarantined: 1024,
            max_sends: 3,
            policy: Policy::default(),
        }
    }
}

/// Cause if a query has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// Cancelled by the caller.
    Cancelled,
    /// Deadline passed before a node took the query.
    NotSent,
    /// Deadline passed before this node answered.
    NotAnswered(NodeId),
    /// This node was lost, and the query had been sent `sends` times, the limit.
    NodeLost {
        /// Node.
        node: NodeId,
        /// Times that the query was sent.
        sends: u32,
    },
    /// This node returned an error in place of an answer.
    Refused {
        /// Node.
        node: NodeId,
        /// Error code.
        code: u32,
    },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Cancelled => write!(f, "cancelled"),
            Failure::NotSent => write!(f, "deadline passed; no node had a free slot"),
            Failure::NotAnswered(node) => {
                write!(f, "deadline passed; node {node} has not answered")
            }
            Failure::NodeLost { node, sends } => {
                write!(f, "node {node} was lost; the query was sent {sends} times, the limit")
            }
            Failure::Refused { node, code } => write!(f, "node {node} returned error {code}"),
        }
    }
}

/// Query outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The answer is in this slot until [`super::Ledger::release`].
    Answered {
        /// Node.
        node: NodeId,
        /// Slot.
        slot: u32,
    },
    /// No answer follows.
    Failed(Failure),
}

/// Report on a query. Each query has exactly one [`Notice::Ended`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Notice {
    /// Tokens in a partial answer have arrived.
    Tokens {
        /// Query.
        query: QueryId,
        /// Submission token.
        token: u64,
        /// Node.
        node: NodeId,
        /// Slot that has them.
        slot: u32,
        /// Number of tokens reported before; 0: the first token is among these.
        from: u32,
        /// Number of tokens so far.
        to: u32,
        /// Arrival time of the last token.
        at: Time,
        /// Number of times that the query was sent. If this has risen, the stream began anew: tokens in earlier notices
        /// are void.
        sends: u32,
    },
    /// The query has ended.
    Ended {
        /// Query.
        query: QueryId,
        /// Submission token.
        token: u64,
        /// Outcome.
        outcome: Outcome,
        /// True while a node may still read the query's memory: [`Notice::Returned`] follows.
        quarantined: bool,
    },
    /// A quarantined query's memory may be reused.
    Returned {
        /// Query; the id is stale from now on.
        query: QueryId,
        /// Submission token.
        token: u64,
    },
}

/// Query to be written into a node's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Send {
    /// Query.
    pub query: QueryId,
    /// Submission token.
    pub token: u64,
    /// Node.
    pub node: NodeId,
    /// Slot.
    pub slot: u32,
}

/// Slot whose query has ended without the node, which must be notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Withdrawal {
    /// Node.
    pub node: NodeId,
    /// Slot, quarantined until the node answers or is lost.
    pub slot: u32,
}

/// Ledger counts, now and since construction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Counts {
    /// Queries that wait for a slot, now.
    pub queued: u32,
    /// Slots in use on all nodes, now.
    pub in_flight: u32,
    /// `in_flight` slots whose query has ended without an answer, now.
    pub quarantined: u32,
    /// Queries accepted.
    pub submitted: u64,
    /// Queries ended with an answer.
    pub answered: u64,
    /// Queries ended without one.
    pub failed: u64,
    /// Repeated sends after losses.
    pub resent: u64,
    /// Answers that followed after their query ended.
    pub late: u64,
}
