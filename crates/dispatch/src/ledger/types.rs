//! Ids, outcomes and configuration of the ledger.

use super::policy::Policy;
use std::fmt;
use weft_fabric::Time;

/// Query under way: index in the ledger, and number of reuses of that index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueryId {
    pub(super) index: u32,
    pub(super) reuse: u32,
}

/// Present node: place in the ledger, and number of reuses of that place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId {
    pub(super) place: u32,
    pub(super) reuse: u32,
}

impl QueryId {
    /// Id in reports of queries that ended before a ledger accepted them.
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

/// Sizes and rules of a ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LedgerConfig {
    /// Queries under way, from their submission to the return of their memory; at least 1.
    pub queries: u32,
    /// Nodes at a time; at least 1.
    pub nodes: u32,
    /// Most slots of a node; at least 1.
    pub slots: u32,
    /// Quarantined slots of a node at which it takes no more queries; at least 1.
    pub max_quarantined: u32,
    /// Times that a query may be sent, after losses of its nodes; at least 1. With 1, no query is executed
    /// twice.
    pub max_sends: u32,
    /// Choice of nodes.
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

/// Cause of a query without an answer.
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
        /// Its code.
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

/// End of a query.
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
    /// Tokens of an answer in parts have arrived.
    Tokens {
        /// Query.
        query: QueryId,
        /// Token of its submission.
        token: u64,
        /// Node.
        node: NodeId,
        /// Slot that has them.
        slot: u32,
        /// Number of tokens reported before; 0: the first token is among these.
        from: u32,
        /// Number of tokens so far.
        to: u32,
        /// Arrival of the last of them.
        at: Time,
        /// Times that the query was sent. If this has risen, the stream began anew: tokens of earlier notices are void.
        sends: u32,
    },
    /// The query has ended.
    Ended {
        /// Query.
        query: QueryId,
        /// Token of its submission.
        token: u64,
        /// Outcome.
        outcome: Outcome,
        /// True while a node may still read the query's memory: [`Notice::Returned`] follows.
        quarantined: bool,
    },
    /// The memory of a quarantined query may be reused.
    Returned {
        /// Query; its id is stale from now on.
        query: QueryId,
        /// Token of its submission.
        token: u64,
    },
}

/// Query to be written into a slot of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Send {
    /// Query.
    pub query: QueryId,
    /// Token of its submission.
    pub token: u64,
    /// Node.
    pub node: NodeId,
    /// Slot.
    pub slot: u32,
}

/// Slot whose query has ended without its node, which is to be notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Withdrawal {
    /// Node.
    pub node: NodeId,
    /// Slot, quarantined until the node answers or is lost.
    pub slot: u32,
}

/// Counts of a ledger, now and since its construction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Counts {
    /// Queries that wait for a slot, now.
    pub queued: u32,
    /// Slots in use on all nodes, now.
    pub in_flight: u32,
    /// Those of `in_flight` whose query has ended without an answer, now.
    pub quarantined: u32,
    /// Queries accepted.
    pub submitted: u64,
    /// Queries ended with an answer.
    pub answered: u64,
    /// Queries ended without one.
    pub failed: u64,
    /// Repeated sends after losses.
    pub resent: u64,
    /// Answers that followed the end of their query.
    pub late: u64,
}
