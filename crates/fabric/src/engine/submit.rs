//! Submission: validation, rounds, and the calls that write.
//!
//! Validation precedes all posts, so a rejected request has no effect. `post.rs` posts the parts to
//! links, `complete.rs` takes the completions.

use super::counters;
use super::route::EnginePeer;
use super::state::Engine;
use super::target::WriteTarget;
use crate::clock;
use crate::driver::{DriverRequest, Requests};
use crate::error::{Error, Result};
use crate::inbox::{PendingOutcome, SubmissionDescriptor, SubmissionOperation};
use crate::link::ScatterPart;
use crate::request::{CompletionCallback, LaneTarget, Request, RequestTag};
use crate::trace::{Trace, WriteRecord};
use crate::types::{CounterId, Lane, Page, RequestId, TrafficClass, bytes_of};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weft_control::Rank;

/// One write of a scatter: a peer and the pages for it.
#[derive(Clone, Debug)]
pub struct PeerWrite<'a> {
    /// The peer written to.
    pub peer: Rank,
    /// The pages to write; a signal if empty.
    pub pages: &'a [Page],
}

impl Engine {
    /// Writes `pages` to `peer` and raises `counter` there by the write's part count, in `round`.
    ///
    /// One page is a plain write, several are a paged write, none is a signal. Returns before
    /// the bytes have arrived; the sources stay borrowed until [`Engine::is_drained`].
    ///
    /// # Errors
    /// [`Error::NoCredit`] if the peer has not released an earlier round; [`Error::OldRound`] if it has
    /// released this one; [`Error::OutOfRange`], [`Error::Unknown`], [`Error::NotLinked`],
    /// [`Error::Limit`], [`Error::Poisoned`]. No byte was written then.
    pub fn write(
        &mut self,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: &[Page],
    ) -> Result<RequestId> {
        self.check()?;
        let id = self.write_tagged::<true>(peer, counter, round, pages, RequestTag::CALLER)?;
        self.flush_all();
        Ok(if self.sink.held { self.hold_write(id, peer) } else { id })
    }

    /// A write without bytes.
    pub fn signal(&mut self, peer: Rank, counter: CounterId, round: u64) -> Result<RequestId> {
        self.write(peer, counter, round, &[])
    }

    /// Writes to several peers under one request. `done` is called once, on the thread that makes progress,
    /// when every source may be reused or the request has failed; possibly inside this call.
    /// [`Engine::scatter_group`] costs less for repeated writes to the same peers.
    ///
    /// # Errors
    /// Same as [`Engine::write`], for the first write that is rejected. No byte was written then.
    pub fn scatter(
        &mut self,
        writes: &[PeerWrite<'_>],
        counter: CounterId,
        round: u64,
        done: Option<CompletionCallback>,
    ) -> Result<RequestId> {
        self.scatter_in(writes, counter, |_| round, done)
    }

    /// [`Engine::scatter`] in the next round toward each peer ([`Engine::next_round`]). Several writes to
    /// one peer belong to one round.
    ///
    /// # Errors
    /// Same as [`Engine::scatter`].
    pub fn scatter_next(
        &mut self,
        writes: &[PeerWrite<'_>],
        counter: CounterId,
        done: Option<CompletionCallback>,
    ) -> Result<RequestId> {
        if let [write] = writes {
            let round = self.next_round(counter, write.peer)?;
            return self.scatter(writes, counter, round, done);
        }
        let next = |write: &PeerWrite<'_>| self.next_round(counter, write.peer);
        let rounds: Vec<u64> = writes.iter().map(next).collect::<Result<_>>()?;
        self.scatter_in(writes, counter, |write| rounds[write], done)
    }

    /// [`Engine::scatter`] with a round for each write, by index. Writes to one peer have one round.
    fn scatter_in(
        &mut self,
        writes: &[PeerWrite<'_>],
        counter: CounterId,
        round_of: impl Fn(usize) -> u64,
        done: Option<CompletionCallback>,
    ) -> Result<RequestId> {
        if let ([write], None) = (writes, &done) {
            return self.write(write.peer, counter, round_of(0), write.pages);
        }
        self.check()?;
        self.check_room()?;
        let mut parts = std::mem::take(&mut self.parts);
        let admitted = self.admit_all(writes, counter, &round_of, &mut parts);
        let id = admitted.map(|()| {
            let (id, request) = self.requests.open(RequestTag::CALLER, Request::SEVERAL);
            request.call_at_end(done);
            self.post_admitted(id, counter, &round_of, &mut parts[..writes.len()], writes)
        });
        self.parts = parts;
        id
    }

    /// Submits and clears a driver's requests.
    pub fn submit(&mut self, requests: &mut Requests) -> Result<()> {
        if requests.is_empty() {
            return Ok(());
        }
        let begin = self.completed_tags.len();
        let result = self.submit_entries(requests);
        let ended = begin..self.completed_tags.len();
        self.flush_all();
        if self.sink.held {
            self.hold_entries(requests, ended);
        }
        if !self.open_scatters.is_empty() {
            self.end_scatters();
        }
        requests.clear();
        result
    }

    fn submit_entries(&mut self, requests: &mut Requests) -> Result<()> {
        self.check()?;
        let Requests { entries, pages: all_pages, parts: all_parts, rounds } = requests;
        for entry in entries {
            match entry {
                DriverRequest::Credit { peer, counter } => {
                    self.credit_round(*peer, *counter, true)?
                }
                DriverRequest::Write { peer, counter, round, pages, tag } => {
                    let pages = &all_pages[pages.clone()];
                    let tag = RequestTag(*tag);
                    let id = self.write_tagged::<false>(*peer, *counter, *round, pages, tag)?;
                    if id == RequestId::DONE && tag.is_of_driver() {
                        self.completed_tags.push(tag.0);
                    }
                }
                DriverRequest::Scatter { counter, source, parts, tag } => {
                    let (range, rounds) = (parts.clone(), &rounds[parts.clone()]);
                    let parts = (range.clone(), &mut all_parts[range]);
                    self.scatter_parts(*counter, *source, parts, rounds, RequestTag(*tag))?;
                }
            }
        }
        Ok(())
    }

    /// Submits a descriptor as [`Engine::write`] or [`Engine::credit`] does, and delivers the outcome on
    /// completion or rejection.
    pub(crate) fn submit_one(
        &mut self,
        descriptor: &SubmissionDescriptor,
        mut outcome: PendingOutcome,
    ) {
        let (peer, counter) = (descriptor.peer, descriptor.counter);
        if descriptor.operation == SubmissionOperation::Credit {
            let result = self.credit(peer, counter);
            self.flush_all();
            return outcome.deliver(result.map_err(|error| error.to_string()));
        }
        let mut pages = std::mem::take(&mut self.slices);
        pages.clear();
        if descriptor.length > 0
            && let Err(error) = descriptor.slices().append_to(&mut pages)
        {
            self.slices = pages;
            return outcome.deliver(Err(error.to_string()));
        }
        // A rejected write drops the callback, which leaves the outcome here.
        let outcome = Arc::new(Mutex::new(outcome));
        let ends = outcome.clone();
        let done: CompletionCallback = Box::new(move |result| locked(&ends).deliver(result));
        let write = [PeerWrite { peer, pages: &pages }];
        let result = self.scatter(&write, counter, descriptor.round, Some(done));
        self.slices = pages;
        if let Err(error) = result {
            locked(&outcome).deliver(Err(error.to_string()));
        }
    }

    /// True if the request's sources may be reused. A failed request is drained, too; the group is then
    /// poisoned.
    pub fn is_drained(&mut self, request: RequestId) -> bool {
        self.requests.get(request).is_none()
    }

    /// True if the request ended with an error, such as poison: the write's outcome is unknown.
    pub(crate) fn has_failed(&self, request: RequestId) -> bool {
        self.requests.has_failed(request)
    }

    #[inline(always)]
    pub(super) fn check_room(&self) -> Result<()> {
        if self.requests.is_full() { Err(self.no_room()) } else { Ok(()) }
    }

    #[cold]
    #[inline(never)]
    fn no_room(&self) -> Error {
        let (wanted, limit) = (self.requests.len() as u64 + 1, self.config.max_requests as u64);
        Error::Limit { what: "requests in flight", wanted, limit }
    }

    /// Writes to one peer. [`RequestId::DONE`] if the write has completed. With `FLUSH`, a one-part write
    /// flushes the link; otherwise the caller does, also after a write over an inline route.
    #[inline(always)]
    fn write_tagged<const FLUSH: bool>(
        &mut self,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: &[Page],
        tag: RequestTag,
    ) -> Result<RequestId> {
        let Engine { peers, regions, counters, lanes, requests, .. } = self;
        let ends = counters::get(counters, counter);
        let Some(target) = WriteTarget::admit(peers, ends, regions, lanes, peer, pages, round)
        else {
            return Err(self.refused(peer, counter, round, pages));
        };
        let (link, class) = (target.path.link, target.class);
        if target.path.inline {
            let entry = target.enter(pages, round);
            let destination = LaneTarget { peer, lane: entry.lane, credits: None };
            if let Some(trace) = &mut self.trace {
                record(trace, peer, entry.lane, entry.value, pages);
            }
            let piggyback =
                self.pending_credits.pop_if(|credit| credit.peer == peer).map(|credit| credit.lane);
            if let Err(why) = self.post_inline::<FLUSH>(link, destination, class, piggyback, pages)
            {
                self.write_failed(peer, &why);
                return Ok(RequestId::FAILED);
            }
            return Ok(RequestId::DONE);
        }
        if requests.is_full() {
            return Err(self.no_room());
        }
        let is_alone = !target.queue.is_listed();
        let takes_rider = target.takes_rider();
        let entry = target.enter(pages, round);
        let destination = LaneTarget { peer, lane: entry.lane, credits: None };
        if let Some(trace) = &mut self.trace {
            record(trace, peer, entry.lane, entry.value, pages);
        }
        if entry.is_single && is_alone {
            let id = if takes_rider && !self.pending_credits.is_empty() {
                self.request_with_credit(link, destination, class, pages, tag)
            } else {
                self.request(link, destination, class, None, pages, tag)
            };
            // Pending credits leave with the same flush.
            if FLUSH && self.pending_credits.is_empty() {
                self.flush_link(usize::from(link));
            } else {
                self.unflushed |= 1 << link;
            }
            return Ok(id);
        }
        Ok(self.request_parts(destination, class, entry.is_single, pages, tag))
    }

    /// Makes a one-part write that carries the newest pending credit, if it is for the same peer.
    #[inline(never)]
    fn request_with_credit(
        &mut self,
        link: u16,
        destination: LaneTarget,
        class: TrafficClass,
        pages: &[Page],
        tag: RequestTag,
    ) -> RequestId {
        let may_ride = |credit: &mut LaneTarget| {
            credit.peer == destination.peer && credit.lane.immediate() != 0
        };
        let piggyback = self.pending_credits.pop_if(may_ride);
        self.request(link, destination, class, piggyback, pages, tag)
    }

    /// Validates every write of a scatter. Fills the first entries in `parts`; one-part writes name the
    /// link.
    #[inline(never)]
    fn admit_all(
        &mut self,
        writes: &[PeerWrite<'_>],
        counter: CounterId,
        round_of: impl Fn(usize) -> u64,
        parts: &mut Vec<ScatterPart>,
    ) -> Result<()> {
        let Engine { peers, regions, counters, lanes, .. } = self;
        if parts.len() < writes.len() {
            parts.resize(writes.len(), ScatterPart::EMPTY);
        }
        let mut ends = counters::get(counters, counter);
        for (index, (write, part)) in writes.iter().zip(parts).enumerate() {
            let (PeerWrite { peer, pages }, round) = (write, round_of(index));
            let ends = ends.as_deref_mut();
            let Some(target) = WriteTarget::admit(peers, ends, regions, lanes, *peer, pages, round)
            else {
                return Err(self.refused(*peer, counter, round, pages));
            };
            (part.peer, part.link) = (*peer, ScatterPart::NO_LINK);
            if let [page] = *pages
                && page.length <= target.path.single_bytes
            {
                (part.link, part.page) = (target.path.link, *page);
            }
        }
        Ok(())
    }

    /// Error for a rejected write.
    #[cold]
    #[inline(never)]
    pub(super) fn refused(
        &mut self,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: &[Page],
    ) -> Error {
        let refusal = self
            .check_peer(peer)
            .and_then(|()| pages.iter().try_for_each(|page| self.check_page(peer, page)))
            .and_then(|()| self.check_round(peer, counter, round));
        // All other checks have passed.
        refusal.err().unwrap_or(Error::NotLinked { counter })
    }

    pub(super) fn check_peer(&self, peer: Rank) -> Result<()> {
        match self.peers.get(peer.index()) {
            Some(EnginePeer { path: Some(_), .. }) => Ok(()),
            _ => Err(Error::Unknown { what: "rank", number: peer.0.into() }),
        }
    }
}

fn locked(outcome: &Mutex<PendingOutcome>) -> MutexGuard<'_, PendingOutcome> {
    outcome.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a write to the trace.
#[cold]
#[inline(never)]
pub(super) fn record(trace: &mut Trace, peer: Rank, lane: Lane, value: u64, pages: &[Page]) {
    let (lane, bytes) = (lane.id().get(), bytes_of(pages));
    trace.write(WriteRecord { at: clock::now(), peer, lane, value, bytes });
}
