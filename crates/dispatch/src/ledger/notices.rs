//! Ledger notices, and returned slots and queries.

use super::node::NodeState;
use super::types::{NodeId, Notice, Outcome, QueryId};
use super::{Ledger, Query, State};
use crate::error::{Error, Result};

impl Ledger {
    /// Enters a query into the notice list, once.
    pub(super) fn notify(&mut self, index: u32) {
        if !self.notices.has(index) {
            self.notices.push_last(index);
        }
    }

    /// The next notice. An answered query keeps its slot until [`Ledger::release`].
    pub fn next_notice(&mut self) -> Option<Notice> {
        let index = self.notices.pop_first()?;
        let Query { tokens, tokens_reported, .. } = self.queries[index as usize];
        if tokens > tokens_reported
            && let Some(notice) = self.take_tokens(index)
        {
            return Some(notice);
        }
        let query = &mut self.queries[index as usize];
        let (id, token) = (QueryId { index, reuse: query.reuse }, query.token);
        if std::mem::replace(&mut query.reported, true) {
            self.free_query(index);
            return Some(Notice::Returned { query: id, token });
        }
        let State::Ended(outcome) = query.state else { return None };
        let borrows = query.place.is_some();
        if !borrows {
            self.free_query(index);
        }
        let quarantined = borrows && matches!(outcome, Outcome::Failed(_));
        Some(Notice::Ended { query: id, token, outcome, quarantined })
    }

    /// Same as [`Ledger::next_notice`], with [`Ledger::release`] for an answered query: for a caller that reads the
    /// answer before the slot is used again.
    #[inline]
    pub(crate) fn next_notice_released(&mut self) -> Option<Notice> {
        let notice = self.next_notice()?;
        if let Notice::Ended { query, outcome: Outcome::Answered { .. }, .. } = notice {
            self.put_slot_back(query.index);
            self.free_query(query.index);
        }
        Some(notice)
    }

    /// Returns an answered query's slot after its notice was taken.
    ///
    /// # Errors
    /// [`Error::UnknownQuery`] for any other query.
    pub fn release(&mut self, id: QueryId) -> Result<()> {
        let query = self.query(id)?;
        if !query.reported || !matches!(query.state, State::Ended(Outcome::Answered { .. })) {
            return Err(Error::UnknownQuery(id));
        }
        self.put_slot_back(id.index);
        self.free_query(id.index);
        Ok(())
    }

    /// Notice for tokens that arrived and were not reported. An answer's tokens precede its end.
    fn take_tokens(&mut self, index: u32) -> Option<Notice> {
        let query = &mut self.queries[index as usize];
        let is_due = matches!(query.state, State::Sent | State::Ended(Outcome::Answered { .. }));
        let (place, slot) =
            query.place.filter(|_| is_due && query.tokens > query.tokens_reported)?;
        let from = std::mem::replace(&mut query.tokens_reported, query.tokens);
        let (id, token) = (QueryId { index, reuse: query.reuse }, query.token);
        let (to, at, sends) = (query.tokens, query.tokens_at, query.sends);
        if matches!(query.state, State::Ended(_)) {
            self.notices.push_first(index);
        }
        let node = NodeId { place, reuse: self.nodes[place as usize].reuse };
        Some(Notice::Tokens { query: id, token, node, slot, from, to, at, sends })
    }

    pub(super) fn put_slot_back(&mut self, index: u32) {
        let Some((place, slot)) = self.queries[index as usize].place.take() else { return };
        let node = &mut self.nodes[place as usize];
        node.put_back(slot);
        if node.state == NodeState::Lost && node.load.in_flight == 0 {
            node.leave();
        }
    }

    pub(super) fn free_query(&mut self, index: u32) {
        let query = &mut self.queries[index as usize];
        query.state = State::Free;
        query.reuse = query.reuse.wrapping_add(1);
        self.free.push(index);
    }
}
