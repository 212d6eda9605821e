//! From a request to parts with a link: checks, rounds, and the calls.
//!
//! Everything is checked before anything is posted, so a refused request has no effect. `post.rs` offers
//! the parts to links, `complete.rs` takes their ends.

use super::counters;
use super::target::Target;
use super::{Engine, Peer};
use crate::clock;
use crate::driver::{Ask, Requests};
use crate::error::{Error, Result};
use crate::inbox::{Descriptor, Operation, Outcome};
use crate::link::ScatterPart;
use crate::request::{Aim, Callback, Request, Tag};
use crate::trace::{Trace, WriteRecord};
use crate::types::{Class, CounterId, Lane, Page, RequestId, bytes_of};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weft_control::Rank;

/// One write of a scatter: a peer and what goes to it.
#[derive(Clone, Debug)]
pub struct PeerWrite<'a> {
    /// The peer written to.
    pub peer: Rank,
    /// What is written; a signal if empty.
    pub pages: &'a [Page],
}

impl Engine {
    /// Writes `pages` to `peer` and raises its `counter` by the parts of that write, in `round`.
    ///
    /// One page is a plain write, several are a paged write, none is a signal. Returns before
    /// the bytes have arrived; the sources stay borrowed until [`Engine::is_drained`].
    ///
    /// # Errors
    /// [`Error::NoCredit`] if the peer has not released the round before; [`Error::OldRound`] if it has
    /// released this one; [`Error::OutOfRange`], [`Error::Unknown`], [`Error::NotLinked`],
    /// [`Error::Limit`], [`Error::Poisoned`]. Nothing was written then.
    pub fn write(
        &mut self,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: &[Page],
    ) -> Result<RequestId> {
        self.check()?;
        let id = self.write_tagged::<true>(peer, counter, round, pages, Tag::CALLER)?;
        self.flush_all();
        Ok(if self.sink.held { self.hold_write(id, peer) } else { id })
    }

    /// A write of no bytes.
    pub fn signal(&mut self, peer: Rank, counter: CounterId, round: u64) -> Result<RequestId> {
        self.write(peer, counter, round, &[])
    }

    /// Several peers' writes under one request. `done` is called once, on the thread that makes
    /// progress, when every source may be reused or the request has failed; from within this call if
    /// that is now. [`Engine::scatter_group`] costs less for peers that are written to again and again.
    ///
    /// # Errors
    /// As [`Engine::write`], for the first write that is refused. Nothing was written then.
    pub fn scatter(
        &mut self,
        writes: &[PeerWrite<'_>],
        counter: CounterId,
        round: u64,
        done: Option<Callback>,
    ) -> Result<RequestId> {
        self.scatter_in(writes, counter, |_| round, done)
    }

    /// [`Engine::scatter`] in the next round toward each peer ([`Engine::next_round`]). Several writes to
    /// the same peer are of the same round.
    ///
    /// # Errors
    /// As [`Engine::scatter`].
    pub fn scatter_next(
        &mut self,
        writes: &[PeerWrite<'_>],
        counter: CounterId,
        done: Option<Callback>,
    ) -> Result<RequestId> {
        if let [write] = writes {
            let round = self.next_round(counter, write.peer)?;
            return self.scatter(writes, counter, round, done);
        }
        let next = |write: &PeerWrite<'_>| self.next_round(counter, write.peer);
        let rounds: Vec<u64> = writes.iter().map(next).collect::<Result<_>>()?;
        self.scatter_in(writes, counter, |write| rounds[write], done)
    }

    /// [`Engine::scatter`] with a round for each write, by its place. Writes to the same peer have the same
    /// round.
    fn scatter_in(
        &mut self,
        writes: &[PeerWrite<'_>],
        counter: CounterId,
        round_of: impl Fn(usize) -> u64,
        done: Option<Callback>,
    ) -> Result<RequestId> {
        if let ([write], None) = (writes, &done) {
            return self.write(write.peer, counter, round_of(0), write.pages);
        }
        self.check()?;
        self.check_room()?;
        let mut parts = std::mem::take(&mut self.parts);
        let admitted = self.admit_all(writes, counter, &round_of, &mut parts);
        let id = admitted.map(|()| {
            let (id, request) = self.requests.open(Tag::CALLER, Request::SEVERAL);
            request.call_at_end(done);
            self.post_admitted(id, counter, &round_of, &mut parts, writes)
        });
        self.parts = parts;
        id
    }

    /// Submits everything that a driver asked for, and empties `requests`.
    pub fn submit(&mut self, requests: &mut Requests) -> Result<()> {
        if requests.is_empty() {
            return Ok(());
        }
        let begin = self.ended.len();
        let result = self.submit_asks(requests);
        let ended = begin..self.ended.len();
        self.flush_all();
        if self.sink.held {
            self.hold_asks(requests, ended);
        }
        requests.asks.clear();
        requests.pages.clear();
        result
    }

    fn submit_asks(&mut self, requests: &Requests) -> Result<()> {
        self.check()?;
        for ask in &requests.asks {
            match ask {
                Ask::Credit { peer, counter } => self.credit_round(*peer, *counter, true)?,
                Ask::Write { peer, counter, round, pages, tag } => {
                    let pages = &requests.pages[pages.clone()];
                    let tag = Tag(*tag);
                    let id = self.write_tagged::<false>(*peer, *counter, *round, pages, tag)?;
                    if id == RequestId::DONE {
                        self.ended.push(tag.0);
                    }
                }
            }
        }
        Ok(())
    }

    /// Submits a descriptor as [`Engine::write`] or [`Engine::credit`] would, and delivers its outcome when
    /// it has ended or is refused.
    pub(crate) fn submit_one(&mut self, descriptor: &Descriptor, mut outcome: Outcome) {
        let (peer, counter) = (descriptor.peer, descriptor.counter);
        if descriptor.operation == Operation::Credit {
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
        // A write that is refused drops its callback, which leaves the outcome here.
        let outcome = Arc::new(Mutex::new(outcome));
        let ends = outcome.clone();
        let done: Callback = Box::new(move |result| locked(&ends).deliver(result));
        let write = [PeerWrite { peer, pages: &pages }];
        let result = self.scatter(&write, counter, descriptor.round, Some(done));
        self.slices = pages;
        if let Err(error) = result {
            locked(&outcome).deliver(Err(error.to_string()));
        }
    }

    /// Whether the request's sources may be reused. A failed request is drained too, and the group
    /// is then poisoned.
    pub fn is_drained(&mut self, request: RequestId) -> bool {
        self.requests.get(request).is_none()
    }

    /// Whether the request ended with an error, as by the poison of the group: the outcome of its write is
    /// unknown.
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
        Error::Limit { what: "requests under way", wanted, limit }
    }

    /// Writes to one peer. [`RequestId::DONE`] if that has ended already. Unless `FLUSH`, the link is yet to be
    /// flushed; a write of several parts is so in any case.
    #[inline(always)]
    fn write_tagged<const FLUSH: bool>(
        &mut self,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: &[Page],
        tag: Tag,
    ) -> Result<RequestId> {
        let Engine { peers, regions, counters, lanes, requests, .. } = self;
        let ends = counters::get(counters, counter);
        let Some(target) = Target::admit(peers, ends, regions, lanes, peer, pages, round) else {
            return Err(self.refused(peer, counter, round, pages));
        };
        let (link, class) = (target.path.link, target.class);
        if target.path.inline {
            let entry = target.enter(pages, round);
            let aim = Aim { peer, lane: entry.lane, credits: None };
            if let Some(trace) = &mut self.trace {
                record(trace, peer, entry.lane, entry.value, pages);
            }
            let rider = self.owed.pop_if(|credit| credit.peer == peer).map(|credit| credit.lane);
            if let Err(why) = self.post_inline(link, aim, class, rider, pages) {
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
        let aim = Aim { peer, lane: entry.lane, credits: None };
        if let Some(trace) = &mut self.trace {
            record(trace, peer, entry.lane, entry.value, pages);
        }
        if entry.is_single && is_alone {
            let id = if takes_rider && !self.owed.is_empty() {
                self.request_with_credit(link, aim, class, pages, tag)
            } else {
                self.request(link, aim, class, None, pages, tag)
            };
            // Credits that are owed leave with the same flush.
            if FLUSH && self.owed.is_empty() {
                self.flush_link(usize::from(link));
            } else {
                self.unflushed |= 1 << link;
            }
            return Ok(id);
        }
        Ok(self.request_parts(aim, class, entry.is_single, pages, tag))
    }

    /// A write of one part that takes the newest credit along, if that is owed to the same peer.
    #[inline(never)]
    fn request_with_credit(
        &mut self,
        link: u16,
        aim: Aim,
        class: Class,
        pages: &[Page],
        tag: Tag,
    ) -> RequestId {
        let may_ride = |credit: &mut Aim| credit.peer == aim.peer && credit.lane.immediate() != 0;
        let rider = self.owed.pop_if(may_ride);
        self.request(link, aim, class, rider, pages, tag)
    }

    /// Checks every write of a scatter. Fills `parts`: those that are one part as they are carry their
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
        parts.clear();
        parts.reserve(writes.len());
        for (place, PeerWrite { peer, pages }) in writes.iter().enumerate() {
            let round = round_of(place);
            let ends = counters::get(counters, counter);
            let Some(target) = Target::admit(peers, ends, regions, lanes, *peer, pages, round)
            else {
                return Err(self.refused(*peer, counter, round, pages));
            };
            let mut part = ScatterPart { peer: *peer, ..ScatterPart::BLANK };
            if let [page] = *pages
                && page.length <= target.path.single_bytes
            {
                (part.link, part.page) = (target.path.link, *page);
            }
            parts.push(part);
        }
        Ok(())
    }

    /// Why a write was refused.
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
            Some(Peer { path: Some(_), .. }) => Ok(()),
            _ => Err(Error::Unknown { what: "rank", number: peer.0.into() }),
        }
    }
}

fn locked(outcome: &Mutex<Outcome>) -> MutexGuard<'_, Outcome> {
    outcome.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a write to the trace.
#[cold]
#[inline(never)]
pub(super) fn record(trace: &mut Trace, peer: Rank, lane: Lane, value: u64, pages: &[Page]) {
    let (lane, bytes) = (lane.id().get(), bytes_of(pages));
    trace.write(WriteRecord { at: clock::now(), peer, lane, value, bytes });
}
