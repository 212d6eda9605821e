//! Query ends: answers, errors, cancels and deadlines.

use super::types::{Failure, NodeId, Outcome, QueryId, Withdrawal};
use super::{Ledger, Query, State};
use crate::error::{Error, Result};
use weft_fabric::Time;

impl Ledger {
    /// Enters that an answer arrived in a slot: the query ends with it, unless it has ended before.
    ///
    /// # Errors
    /// [`Error::UnknownNode`]; [`Error::UnexpectedAnswer`] without a query in flight there.
    pub fn answered(&mut self, now: Time, node: NodeId, slot: u32) -> Result<()> {
        self.end_in_slot(now, node, slot, Outcome::Answered { node, slot })
    }

    /// Enters that an error arrived in place of an answer.
    ///
    /// # Errors
    /// As [`Ledger::answered`].
    pub fn refused(&mut self, now: Time, node: NodeId, slot: u32, code: u32) -> Result<()> {
        self.end_in_slot(now, node, slot, Outcome::Failed(Failure::Refused { node, code }))
    }

    fn end_in_slot(&mut self, now: Time, id: NodeId, slot: u32, outcome: Outcome) -> Result<()> {
        let node = self.node(id)?;
        let unexpected = || Error::UnexpectedAnswer { node: id, slot };
        let index = node.query_in(slot).ok_or_else(unexpected)?;
        let query = &self.queries[index as usize];
        match query.state {
            State::Sent => {
                let latency = now.0.saturating_sub(query.sent_at.0);
                self.nodes[id.place()].load.answered_after(latency);
                if let Outcome::Failed(_) = outcome {
                    self.put_slot_back(index);
                }
                self.end(index, outcome);
            }
            State::Ended(Outcome::Failed(_)) => {
                self.counts.late += 1;
                self.nodes[id.place()].quarantined -= 1;
                self.put_slot_back(index);
                self.returned(index);
            }
            State::Ended(Outcome::Answered { .. }) | State::Queued | State::Free => {
                return Err(unexpected());
            }
        }
        Ok(())
    }

    /// Ends a query without an answer. Returns the slot if a node has it: the node may be notified. `None` if the
    /// query had no slot, or has ended already; that outcome then stands.
    ///
    /// # Errors
    /// [`Error::UnknownQuery`].
    pub fn cancel(&mut self, id: QueryId) -> Result<Option<Withdrawal>> {
        self.query(id)?;
        Ok(self.withdraw(id.index, |_| Failure::Cancelled))
    }

    /// Fails the query with the earliest deadline, if that has passed. Returns true if it did; call it until it
    /// returns false. `withdrawn` is called with the query's slot if a node has it.
    pub fn expire(&mut self, now: Time, withdrawn: impl FnOnce(Withdrawal)) -> bool {
        let Some((_, index)) = self.deadlines.first().filter(|(at, _)| *at <= now) else {
            return false;
        };
        let withdrawal = self.withdraw(index, |node| match node {
            Some(node) => Failure::NotAnswered(node),
            None => Failure::NotSent,
        });
        if let Some(withdrawal) = withdrawal {
            withdrawn(withdrawal);
        }
        true
    }

    /// The earliest deadline among queries that have not ended.
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.first().map(|(at, _)| at)
    }

    pub(super) fn withdraw(
        &mut self,
        index: u32,
        failure: impl FnOnce(Option<NodeId>) -> Failure,
    ) -> Option<Withdrawal> {
        let Query { state, place, .. } = self.queries[index as usize];
        if let State::Ended(_) | State::Free = state {
            return None;
        }
        let held = place.map(|(place, slot)| {
            let node = NodeId { place, reuse: self.nodes[place as usize].reuse };
            Withdrawal { node, slot }
        });
        if let Some(Withdrawal { node, .. }) = held {
            self.nodes[node.place()].quarantined += 1;
        }
        self.waiting.remove(index);
        self.end(index, Outcome::Failed(failure(held.map(|held| held.node))));
        held
    }

    pub(super) fn end(&mut self, index: u32, outcome: Outcome) {
        self.deadlines.remove(index);
        match outcome {
            Outcome::Answered { .. } => self.counts.answered += 1,
            Outcome::Failed(_) => self.counts.failed += 1,
        }
        self.queries[index as usize].state = State::Ended(outcome);
        self.notify(index);
    }

    /// A query that ended before has free memory: [`Notice::Returned`] is due, or not needed because
    /// [`Notice::Ended`] is still to be taken.
    pub(super) fn returned(&mut self, index: u32) {
        if self.queries[index as usize].reported {
            self.notify(index);
        }
    }
}
