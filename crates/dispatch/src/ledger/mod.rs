//! Ledger: queries in progress, the slots that they use, and how each ends.
//!
//! ```text
//!   submit        next_send             answered                    next_notice, release
//!      |              |                     |                               |
//!   Queued --------> Sent ---------------> Ended(answered) ------------> (free)
//!      |  ^           |  \                                                 ^
//!      |  |  lose     |   \ cancel, expire                                 |
//!      |  +-----------+    +-> Quarantined: ended, slot and memory ---------+
//!      |                       borrowed until the answer or the loss
//!      +-- cancel, expire --> Ended(failed) -----------------------------> (free)
//! ```
//!
//! A slot is free again when its answer has arrived and the caller has read it. Each accepted query has exactly
//! one [`Notice::Ended`]; a quarantined query's notice is followed by one [`Notice::Returned`]. The ledger is a
//! value: no clock, no I/O, no allocation after construction.
//!
//! - `types.rs`: ids, outcomes, configuration
//! - `ends.rs`: query ends; `notices.rs`: notices, slot returns; `streams.rs`: answers in parts
//! - `node.rs`: a node's slots; `nodes.rs`: joins, leaves, losses; `policy.rs`: node selection
//! - `queue.rs`, `deadlines.rs`: query lists, by order and by deadline

mod deadlines;
mod ends;
mod node;
mod nodes;
mod notices;
mod policy;
mod queue;
mod streams;
mod types;

pub use policy::Policy;
pub use types::{
    Counts, Failure, LedgerConfig, NodeId, Notice, Outcome, QueryId, Send, Withdrawal,
};

use crate::error::{Error, Result};
use deadlines::Deadlines;
use node::{Node, NodeState};
use queue::Queue;
use weft_fabric::Time;

/// State at a place in the query table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    Free,
    /// Waits for a slot.
    Queued,
    /// In a slot, without an answer.
    Sent,
    /// Ended; the notice is untaken or the slot unreleased.
    Ended(Outcome),
}

/// Place in the query table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Query {
    reuse: u32,
    state: State,
    token: u64,
    deadline: Time,
    sent_at: Time,
    sends: u32,
    /// Node and slot that it borrows.
    place: Option<(u32, u32)>,
    /// The [`Notice::Ended`] was taken.
    reported: bool,
    /// Answer tokens that have arrived, how many were in notices that were taken, and the last arrival time.
    tokens: u32,
    tokens_reported: u32,
    tokens_at: Time,
}

/// Queries in progress on all nodes of a front end. See the module's page.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ledger {
    config: LedgerConfig,
    queries: Box<[Query]>,
    nodes: Box<[Node]>,
    free: Vec<u32>,
    waiting: Queue,
    /// Queries with a notice to take.
    notices: Queue,
    deadlines: Deadlines,
    /// Place from which [`Policy`] searches.
    cursor: usize,
    counts: Counts,
}

impl Ledger {
    /// Empty ledger, without nodes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a size is zero.
    pub fn new(config: LedgerConfig) -> Result<Ledger> {
        let sizes = [
            ("queries of a ledger", config.queries),
            ("nodes of a ledger", config.nodes),
            ("slots of a node", config.slots),
            ("quarantined slots of a node", config.max_quarantined),
            ("sends of a query", config.max_sends),
        ];
        for (what, value) in sizes {
            if value == 0 || value == u32::MAX {
                let expected = format!("1 to {}", u32::MAX - 1);
                return Err(Error::Invalid { what, value: value.into(), expected });
            }
        }
        let query = Query {
            reuse: 0,
            state: State::Free,
            token: 0,
            deadline: Time(0),
            sent_at: Time(0),
            sends: 0,
            place: None,
            reported: false,
            tokens: 0,
            tokens_reported: 0,
            tokens_at: Time(0),
        };
        let queries = config.queries as usize;
        Ok(Ledger {
            queries: vec![query; queries].into(),
            nodes: (0..config.nodes).map(|_| Node::vacant(config.slots as usize)).collect(),
            free: (0..config.queries).rev().collect(),
            waiting: Queue::new(queries),
            notices: Queue::new(queries),
            deadlines: Deadlines::new(queries),
            cursor: 0,
            counts: Counts::default(),
            config,
        })
    }

    /// Sizes and rules.
    pub fn config(&self) -> &LedgerConfig {
        &self.config
    }

    /// Counts.
    pub fn counts(&self) -> Counts {
        let nodes = || self.nodes.iter().filter(|node| node.state != NodeState::Vacant);
        Counts {
            queued: self.waiting.len(),
            in_flight: nodes().map(|node| node.load.in_flight).sum(),
            quarantined: nodes().map(|node| node.quarantined).sum(),
            ..self.counts
        }
    }

    /// Queries in progress, from submission until the memory returns.
    pub fn under_way(&self) -> u32 {
        self.config.queries - self.free.len() as u32
    }

    // ---- queries

    /// A query with this token that has not ended. O(queries).
    pub fn find(&self, token: u64) -> Option<QueryId> {
        let is_it = |query: &&Query| {
            query.token == token && matches!(query.state, State::Queued | State::Sent)
        };
        let index = self.queries.iter().position(|query| is_it(&query))?;
        Some(QueryId { index: index as u32, reuse: self.queries[index].reuse })
    }

    /// Cancels every query that has not ended, as [`Ledger::cancel`] does. O(queries).
    pub fn cancel_all(&mut self, mut withdrawn: impl FnMut(Withdrawal)) {
        for index in 0..self.config.queries {
            if let Some(withdrawal) = self.withdraw(index, |_| Failure::Cancelled) {
                withdrawn(withdrawal);
            }
        }
    }

    /// Accepts a query; `token` names it in notices. It fails at `deadline` unless it has ended before.
    ///
    /// # Errors
    /// [`Error::Full`]: back-pressure.
    pub fn submit(&mut self, token: u64, deadline: Time) -> Result<QueryId> {
        let limit = self.config.queries;
        let full = || Error::Full { what: "queries under way", limit };
        let index = self.free.pop().ok_or_else(full)?;
        let query = &mut self.queries[index as usize];
        query.state = State::Queued;
        (query.token, query.deadline, query.sends) = (token, deadline, 0);
        (query.place, query.reported) = (None, false);
        let id = QueryId { index, reuse: query.reuse };
        self.waiting.push_last(index);
        self.deadlines.insert(deadline, index);
        self.counts.submitted += 1;
        Ok(id)
    }

    /// Assigns the first waiting query to a slot; `None` without a waiting query or a free slot.
    pub fn next_send(&mut self, now: Time) -> Option<Send> {
        let index = self.waiting.first()?;
        let Ledger { nodes, config, .. } = self;
        let place = config.policy.choose(nodes.len(), self.cursor, |place| {
            let node = &nodes[place];
            let takes = node.state == NodeState::Ready
                && node.has_room()
                && node.quarantined < config.max_quarantined;
            takes.then_some(node.load)
        })?;
        self.cursor = if place + 1 == nodes.len() { 0 } else { place + 1 };
        let slot = nodes[place].take(index)?;
        self.waiting.remove(index);
        let query = &mut self.queries[index as usize];
        query.state = State::Sent;
        query.sent_at = now;
        query.sends += 1;
        (query.tokens, query.tokens_reported) = (0, 0);
        self.counts.resent += u64::from(query.sends > 1);
        query.place = Some((place as u32, slot));
        let node = NodeId { place: place as u32, reuse: self.nodes[place].reuse };
        Some(Send { query: QueryId { index, reuse: query.reuse }, token: query.token, node, slot })
    }

    /// Number of times that a query was sent.
    ///
    /// # Errors
    /// [`Error::UnknownQuery`].
    pub fn sends(&self, id: QueryId) -> Result<u32> {
        Ok(self.query(id)?.sends)
    }

    fn query(&self, id: QueryId) -> Result<&Query> {
        let known = self.queries.get(id.index());
        let known = known.filter(|known| known.reuse == id.reuse && known.state != State::Free);
        let Some(known) = known else { return Err(Error::UnknownQuery(id)) };
        Ok(known)
    }
}
