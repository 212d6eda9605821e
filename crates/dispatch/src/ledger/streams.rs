//! Answers in parts: tokens that arrive before their query ends.

use super::types::{NodeId, Outcome};
use super::{Ledger, State};
use crate::error::{Error, Result};
use weft_fabric::Time;

impl Ledger {
    /// Enters an answer part: the answer in this slot has `tokens` tokens so far. A [`super::Notice::Tokens`] follows,
    /// unless the query has ended.
    ///
    /// # Errors
    /// [`Error::UnknownNode`]; [`Error::UnexpectedAnswer`] without a query in flight there; [`Error::Malformed`] for a
    /// part without a new token.
    pub fn streamed(&mut self, now: Time, node: NodeId, slot: u32, tokens: u32) -> Result<()> {
        let index = self.node(node)?.query_in(slot);
        let unexpected = Error::UnexpectedAnswer { node, slot };
        let Some(index) = index else { return Err(unexpected) };
        let query = &mut self.queries[index as usize];
        match query.state {
            State::Sent if tokens > query.tokens => {
                (query.tokens, query.tokens_at) = (tokens, now);
                self.notify(index);
                Ok(())
            }
            State::Sent => Err(too_few(tokens, query.tokens, "more")),
            State::Ended(Outcome::Failed(_)) => Ok(()),
            State::Ended(Outcome::Answered { .. }) | State::Queued | State::Free => Err(unexpected),
        }
    }

    /// [`Ledger::answered`] for an answer with `tokens` tokens in total. A [`super::Notice::Tokens`] with those that
    /// were not reported precedes the end.
    ///
    /// # Errors
    /// As [`Ledger::answered`]; [`Error::Malformed`] for fewer tokens than arrived in parts.
    pub fn answered_with(&mut self, now: Time, node: NodeId, slot: u32, tokens: u32) -> Result<()> {
        if let Some(index) = self.node(node)?.query_in(slot) {
            let query = &mut self.queries[index as usize];
            if query.state == State::Sent {
                if tokens < query.tokens {
                    return Err(too_few(tokens, query.tokens, "at least as many"));
                }
                if tokens > query.tokens {
                    (query.tokens, query.tokens_at) = (tokens, now);
                }
            }
        }
        self.answered(now, node, slot)
    }
}

fn too_few(tokens: u32, before: u32, expected: &str) -> Error {
    let detail = format!("{tokens} tokens after {before}: expected {expected}");
    Error::Malformed { what: "tokens of an answer", detail }
}
