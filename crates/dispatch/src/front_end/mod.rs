//! Front end: sends queries to accelerator nodes and reports how each ends.
//!
//! One [`FrontEnd`] drives all connections. The caller polls each pair's engine and passes the events to
//! [`FrontEnd::poll`] for that node; it submits the requests to the same engine. After each poll,
//! [`FrontEnd::next_report`] returns the queries that have ended. There is no clock, no I/O, and no allocation but in
//! [`FrontEnd::new`] and [`FrontEnd::join`].
//!
//! - `admission.rs`: query validation
//! - `link.rs`: one connection's slots
//! - `nodes.rs`: nodes that join, drain, leave and are lost
//! - `report.rs`: answers and reports

mod admission;
mod link;
mod nodes;
mod report;

pub(crate) use admission::Admission;
pub use admission::Input;
pub use report::{Answer, Report, Tokens};

use crate::connection::Raise;
use crate::error::Result;
use crate::ledger::{Counts, Ledger, LedgerConfig, NodeId, Notice, Outcome, QueryId};
use crate::memory::query_bytes;
use crate::wire::{Checksum, Fields, Schema};
use link::{Arrival, Link};
use std::sync::Arc;
use weft_fabric::{Event, Memory, Requests, Time};

/// Tensor bytes that are prefetched between submission and copy.
const PREFETCH: u64 = 1024;

/// Front end driver. See the module's page.
#[derive(Debug)]
pub struct FrontEnd {
    ledger: Ledger,
    admission: Arc<Admission>,
    memories: Box<[Arc<Memory>]>,
    /// Each query's tensors, by index.
    inputs: Box<[Input]>,
    /// Tensor bytes in the query that is being written.
    lengths: Box<[u64]>,
    /// By node place.
    links: Box<[Option<Link>]>,
}

impl FrontEnd {
    /// Front end for queries in this schema, whose tensors are in `memories`.
    ///
    /// # Errors
    /// [`Error::Schema`]; [`Error::Invalid`] for the ledger sizes.
    pub fn new(config: LedgerConfig, schema: Schema, memories: &[Arc<Memory>]) -> Result<FrontEnd> {
        schema.check()?;
        let inputs = config.queries as usize * schema.inputs.len();
        Ok(FrontEnd {
            ledger: Ledger::new(config)?,
            lengths: vec![0; schema.inputs.len()].into(),
            admission: Arc::new(Admission::new(schema, memories)),
            memories: memories.into(),
            inputs: vec![Input::default(); inputs].into(),
            links: (0..config.nodes).map(|_| None).collect(),
        })
    }

    /// Accepts a query; `token` names it in reports. Its memory must not change until a report says that it returned
    /// ([`Report::is_last`]).
    ///
    /// # Errors
    /// [`Error::Full`]: back-pressure. [`Error::Query`] for tensors that the schema excludes or that are outside of
    /// their memory.
    pub fn submit(&mut self, token: u64, inputs: &[Input], deadline: Time) -> Result<QueryId> {
        self.admission.check(inputs)?;
        self.submit_checked(token, inputs, deadline)
    }

    /// As [`FrontEnd::submit`], for a query that [`Admission::check`] has accepted.
    pub(crate) fn submit_checked(
        &mut self,
        token: u64,
        inputs: &[Input],
        deadline: Time,
    ) -> Result<QueryId> {
        let query = self.ledger.submit(token, deadline)?;
        let begin = query.index() * inputs.len();
        self.inputs[begin..begin + inputs.len()].copy_from_slice(inputs);
        Ok(query)
    }

    /// Prefetches a query's first tensor bytes, which are copied soon.
    #[inline]
    pub(crate) fn prefetch(&self, inputs: &[Input]) {
        for &Input { memory, offset, length } in inputs {
            self.memories[memory as usize].prefetch(offset, length.min(PREFETCH));
        }
    }

    /// Prefetches a node's likely next answer.
    #[inline]
    pub(crate) fn prefetch_answer(&self, node: NodeId) {
        if let Some(link) = &self.links[node.place()] {
            link.connection.prefetch_next();
        }
    }

    /// Query validation.
    pub(crate) fn admission(&self) -> &Arc<Admission> {
        &self.admission
    }

    /// Queries in progress, from submission until the memory returns.
    pub fn under_way(&self) -> u32 {
        self.ledger.under_way()
    }

    /// True if the next submission finds a place.
    pub fn has_room(&self) -> bool {
        self.ledger.under_way() < self.ledger.config().queries
    }

    /// A query with this token that has not ended. O(queries).
    pub fn find(&self, token: u64) -> Option<QueryId> {
        self.ledger.find(token)
    }

    /// Ends a query without an answer, unless it has ended already. The node that has it is notified.
    ///
    /// # Errors
    /// [`Error::UnknownQuery`].
    pub fn cancel(&mut self, query: QueryId) -> Result<()> {
        if let Some(withdrawal) = self.ledger.cancel(query)?
            && let Some(link) = &mut self.links[withdrawal.node.place()]
        {
            link.withdraw(withdrawal.slot);
        }
        Ok(())
    }

    /// Cancels every query that has not ended. O(queries).
    pub fn cancel_all(&mut self) {
        let FrontEnd { ledger, links, .. } = self;
        ledger.cancel_all(|withdrawal| {
            if let Some(link) = &mut links[withdrawal.node.place()] {
                link.withdraw(withdrawal.slot);
            }
        });
    }

    /// Consumes events from a node's engine, ends queries whose deadline has passed, assigns waiting queries to all
    /// nodes, and emits the writes to this one. A poisoned engine is a lost node. A node that has left in order takes
    /// no more queries ([`FrontEnd::is_draining`]); if it owes answers after a grace period, the pair is poisoned.
    ///
    /// # Errors
    /// [`Error::UnknownNode`]. Protocol violations by the node ([`Error::Malformed`], [`Error::Checksum`],
    /// [`Error::UnexpectedAnswer`]): poison the pair and call [`FrontEnd::lose`].
    pub fn poll(
        &mut self,
        now: Time,
        node: NodeId,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<()> {
        self.receive(now, node, events)?;
        self.advance(now);
        self.emit(node, requests);
        Ok(())
    }

    /// First part of [`FrontEnd::poll`]: consumes events from a node's engine.
    pub(crate) fn receive(&mut self, now: Time, node: NodeId, events: &[Event]) -> Result<()> {
        self.ledger.in_flight(node)?;
        if let Some(link) = &self.links[node.place()] {
            link.connection.prefetch(events);
        }
        for event in events {
            match *event {
                Event::Raised { counter, round, count, .. } => {
                    let link = self.links[node.place()].as_mut();
                    let Some(link) = link else { continue };
                    match link.connection.raised(counter, round, count) {
                        Some(Raise::Header { slot, count }) => {
                            link.connection.arrivals.headers(slot, count);
                            self.answered(now, node, slot)?;
                        }
                        Some(Raise::Payload { slot, count }) => {
                            link.connection.arrivals.payloads(slot, count);
                            self.answered(now, node, slot)?;
                        }
                        Some(Raise::Cancel { .. }) => self.ledger.drain(node)?,
                        Some(Raise::Confirmation { .. }) | None => {}
                    }
                }
                Event::Poisoned(_) => return self.lose(node),
                Event::Credited { .. } | Event::Completed { .. } => {}
            }
        }
        self.note_departure(now, node)?;
        Ok(())
    }

    /// Ends queries whose deadline has passed, and assigns waiting ones. [`FrontEnd::poll`] does so, too; without a
    /// node it is the only progress.
    pub fn advance(&mut self, now: Time) {
        let FrontEnd { ledger, links, .. } = self;
        while ledger.expire(now, |withdrawal| {
            if let Some(link) = &mut links[withdrawal.node.place()] {
                link.withdraw(withdrawal.slot);
            }
        }) {}
        while let Some(send) = ledger.next_send(now) {
            if let Some(link) = &mut links[send.node.place()] {
                link.assign(send.slot, send.query);
            }
        }
    }

    /// Enters an answer if it has arrived entirely.
    #[inline]
    fn answered(&mut self, now: Time, node: NodeId, slot: u32) -> Result<()> {
        let Some(link) = &mut self.links[node.place()] else { return Ok(()) };
        match link.take_answer(node, slot)? {
            Some(Arrival::Answer { tokens: 0 }) => self.ledger.answered(now, node, slot),
            Some(Arrival::Answer { tokens }) => self.ledger.answered_with(now, node, slot, tokens),
            Some(Arrival::Part { tokens }) => self.ledger.streamed(now, node, slot, tokens),
            Some(Arrival::Error { code }) => self.ledger.refused(now, node, slot, code),
            None => Ok(()),
        }
    }

    /// True with queries or cancels to write to a node.
    pub(crate) fn has_output(&self, node: NodeId) -> bool {
        self.links[node.place()].as_ref().is_some_and(Link::has_output)
    }

    /// Last part of [`FrontEnd::poll`]: writes a node's assigned queries and cancels.
    pub(crate) fn emit(&mut self, node: NodeId, requests: &mut Requests) {
        let FrontEnd { links, inputs, lengths, memories, .. } = self;
        let Some(link) = &mut links[node.place()] else { return };
        let width = lengths.len();
        let mut assigned = std::mem::take(&mut link.assigned);
        for (slot, query) in assigned.drain(..) {
            let begin = query.index() * width;
            let inputs = &inputs[begin..begin + width];
            let (turn, word) = link.begin(slot);
            for (tensor, input) in inputs.iter().enumerate() {
                lengths[tensor] = input.length;
            }
            let mut header = Fields { turn, word, checksum: 0, is_part: false, lengths };
            if link.connection.agreement().checksum {
                let mut sum = Checksum::default();
                for input in inputs {
                    sum.add(query_bytes(
                        &memories[input.memory as usize],
                        input.offset,
                        input.length,
                    ));
                }
                header.checksum = sum.value();
            }
            let Link { connection, keys, .. } = link;
            let source = |tensor: usize, _| {
                let Input { memory, offset, .. } = inputs[tensor];
                (keys[memory as usize], offset)
            };
            connection.send(slot, &header, source, 0, requests);
        }
        link.assigned = assigned;
        link.cancel_withdrawn(requests);
        link.confirm_parts(requests);
    }

    /// The next report. The answer in an [`Report::Answered`] and the token bytes are readable until the next call on
    /// this front end.
    pub fn next_report(&mut self) -> Option<Report<'_>> {
        let notice = self.next_notice()?;
        self.report(&notice)
    }

    /// The next report as a notice, whose answer is readable by [`FrontEnd::report`] until the next
    /// [`FrontEnd::poll`], [`FrontEnd::advance`] or [`FrontEnd::join`].
    pub(crate) fn next_notice(&mut self) -> Option<Notice> {
        // Only those calls use a released slot again.
        self.ledger.next_notice_released()
    }

    /// The report for a notice.
    pub(crate) fn report(&self, notice: &Notice) -> Option<Report<'_>> {
        match *notice {
            Notice::Ended { query, token, outcome: Outcome::Answered { node, slot }, .. } => {
                let source = self.links[node.place()].as_ref()?.source(slot);
                Some(Report::Answered { query, token, answer: Answer::new(node, source) })
            }
            Notice::Ended { query, token, outcome: Outcome::Failed(failure), quarantined } => {
                Some(Report::Failed { query, token, failure, quarantined })
            }
            Notice::Returned { query, token } => Some(Report::Returned { query, token }),
            Notice::Tokens { query, token, node, slot, from, to, at, sends } => {
                let bytes = self.links[node.place()].as_ref()?.tokens(slot, from, to);
                let tokens = Tokens { node, from, to, at, sends, bytes };
                Some(match from {
                    0 => Report::FirstToken { query, token, tokens },
                    _ => Report::Tokens { query, token, tokens },
                })
            }
        }
    }

    /// The next time at which [`FrontEnd::advance`] has work without an event.
    pub fn next_deadline(&self) -> Option<Time> {
        let departures = self.links.iter().flatten().filter_map(Link::grace);
        departures.chain(self.ledger.next_deadline()).min()
    }

    /// Query counts.
    pub fn counts(&self) -> Counts {
        self.ledger.counts()
    }
}
