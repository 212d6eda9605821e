//! Completes parts and the requests they belong to.

use super::state::Engine;
use crate::request::PartEnd;
use crate::types::RequestId;
use weft_control::Rank;

impl Engine {
    /// Completes a part in flight.
    #[inline(always)]
    pub(super) fn part_done(&mut self, token: u64) {
        let tag = match self.requests.ended(token) {
            PartEnd::Last { tag } => tag,
            PartEnd::Other { left: 0, id } => return self.close(id, true),
            PartEnd::Other { .. } => return,
            PartEnd::Stray => return stray_completion(),
        };
        if !tag.is_credit() {
            if tag.is_of_driver() {
                self.completed_tags.push(tag.0);
            }
            self.note_unreported();
        }
        if self.released > 0 {
            self.deregister_unread();
        }
    }

    /// Fails a part in flight.
    #[cold]
    pub(super) fn part_failed(&mut self, token: u64, why: String) {
        let Some(id) = self.requests.failed(token, why) else { return stray_completion() };
        self.close_if_drained(id, true);
    }

    pub(super) fn fail_request(&mut self, id: RequestId, peer: Rank, why: String) {
        if let Some(request) = self.requests.get(id) {
            request.fail(why, peer);
        }
    }

    /// Closes a request if all parts have ended.
    pub(super) fn close_if_drained(&mut self, id: RequestId, report: bool) -> bool {
        let drained = self.requests.get(id).is_none_or(|request| request.left == 0);
        if drained {
            self.close(id, report);
        }
        drained
    }

    fn close(&mut self, id: RequestId, report: bool) {
        let Some(request) = self.requests.get(id) else { return };
        let (failure, callback) = request.take_outcome();
        let tag = request.tag;
        self.requests.close(id);
        if self.released > 0 {
            self.deregister_unread();
        }
        // A part toward a peer that has left an unpoisoned group is no failure: the source is free.
        let failure = failure
            .filter(|failure| self.poison.get().is_some() || !self.poison.has_left(failure.peer));
        if report && failure.is_none() && tag.is_of_driver() {
            self.completed_tags.push(tag.0);
        }
        if report && !tag.is_credit() {
            self.epoch += 1;
            self.note_unreported();
        }
        if let Some(failure) = &failure {
            self.requests.record_failure(id);
            self.write_failed(failure.peer, &failure.why);
        }
        if let Some(callback) = callback {
            callback(failure.map_or(Ok(()), |failure| Err(failure.why)));
            // The callback may have left work for the event loop.
            self.note_unreported();
        }
    }
}

#[cold]
#[inline(never)]
fn stray_completion() {
    log::warn!("a link completed a part that was not in flight");
}
