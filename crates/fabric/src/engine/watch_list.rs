//! Conditions that watches report, and the watches that have not ended.

use crate::error::Result;
use crate::types::{CounterId, RequestId, Time};
use weft_control::Rank;

/// Called once with the outcome, with the engine locked: it must not call the engine.
pub type WatchCallback = Box<dyn FnOnce(Result<()>) + Send>;

/// Identifies a watch in an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchId(pub(super) u64);

/// Condition that a watch reports.
#[derive(Clone, Debug)]
pub enum WatchCondition {
    /// Peers have raised a counter as far as [`crate::Engine::wait_in`] would wait for. A peer that has done so may be
    /// credited while others are missing.
    Raised {
        /// The counter.
        counter: CounterId,
        /// A round that is open toward all these peers; `None` for each peer's oldest without a credit now.
        round: Option<u64>,
        /// By peer, the raises.
        expected: Vec<(Rank, u64)>,
    },
    /// A peer has given the credit that a round needs ([`crate::Engine::wait_for_credit`]).
    Credited {
        /// The counter.
        counter: CounterId,
        /// The peer.
        peer: Rank,
        /// The round; `None` for the first without a write.
        round: Option<u64>,
    },
    /// A request has ended ([`crate::Engine::wait_for_request`]).
    Ended(RequestId),
}

/// Condition with the rounds that it names.
pub(super) enum Condition {
    Raised {
        counter: CounterId,
        /// By peer, the round and the raises.
        expected: Vec<(Rank, u64, u64)>,
        /// Peers at the front of `expected` that have not raised the counter so far.
        missing: usize,
    },
    Credited {
        counter: CounterId,
        peer: Rank,
        round: u64,
    },
    Ended(RequestId),
}

/// A watch that has not ended.
pub(super) struct Watch {
    pub(super) id: WatchId,
    pub(super) condition: Condition,
    pub(super) callback: WatchCallback,
    /// Since when it has needed a peer that has left.
    pub(super) left_since: Option<Time>,
}

/// Watches in the order in which they began.
#[derive(Default)]
pub(super) struct Watches {
    pub(super) list: Vec<Watch>,
    pub(super) last: u64,
    /// The engine's event count at the last check.
    pub(super) checked: u64,
}
