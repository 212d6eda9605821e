//! From a request to parts with a link.
//!
//! Everything is checked before anything is posted, so a refused request has no effect. A part that its
//! link takes and ends at once (shm) leaves no trace here; what is still under way when submit returns is
//! a [`crate::request::Request`]. `queue.rs` keeps what found a full queue.

use super::counters;
use super::regions;
use super::target::{Entry, Target};
use super::{Engine, Path, Peer};
use crate::clock;
use crate::driver::{Ask, Requests};
use crate::error::{Error, Result};
use crate::inbox::{Descriptor, Operation, Outcome};
use crate::link::{Posted, Work};
use crate::request::{Aim, Callback, Part, Token};
use crate::trace::{Trace, WriteRecord};
use crate::types::{Class, CounterId, Lane, Page, RegionKey, RequestId, bytes_of};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weft_control::{Cause, Poison, Rank};

/// The tag of credits, whose completion nothing waits for.
pub(super) const CREDIT_TAG: u64 = u64::MAX;

fn locked(outcome: &Mutex<Outcome>) -> MutexGuard<'_, Outcome> {
    outcome.lock().unwrap_or_else(PoisonError::into_inner)
}

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
        let id = self.write_tagged(peer, counter, round, pages, 0)?;
        self.flush_all();
        Ok(id)
    }

    /// A write of no bytes.
    pub fn signal(&mut self, peer: Rank, counter: CounterId, round: u64) -> Result<RequestId> {
        self.write(peer, counter, round, &[])
    }

    /// Several peers' writes under one request. `done` is called once, on the thread that makes
    /// progress, when every source may be reused or the request has failed; from within this call if
    /// that is now.
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

    /// [`Engine::scatter`] with a round for each write, by its place.
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
        self.enter_all(writes, counter, round_of)?;
        let (id, request) = self.requests.open(0);
        request.call_at_end(done);
        let entries = std::mem::take(&mut self.entries);
        let mut under_way = UnderWay::new();
        for (write, entry) in writes.iter().zip(&entries) {
            if entry.is_inline {
                self.post_inline(entry.link, entry.aim, entry.class, None, write.pages);
            } else {
                self.start(id, entry, write.pages, &mut under_way);
            }
        }
        self.entries = entries;
        let id = self.end_submit(id, under_way.parts);
        self.flush_all();
        Ok(id)
    }

    /// Submits everything that a driver asked for, and empties `requests`.
    pub fn submit(&mut self, requests: &mut Requests) -> Result<()> {
        if requests.is_empty() {
            return Ok(());
        }
        let result = self.submit_asks(requests);
        requests.asks.clear();
        requests.pages.clear();
        self.flush_all();
        result
    }

    fn submit_asks(&mut self, requests: &Requests) -> Result<()> {
        self.check()?;
        for ask in &requests.asks {
            match ask {
                Ask::Credit { peer, counter } => self.credit_round(*peer, *counter, true)?,
                Ask::Write { peer, counter, round, pages, tag } => {
                    let pages = &requests.pages[pages.clone()];
                    let id = self.write_tagged(*peer, *counter, *round, pages, *tag)?;
                    if id == RequestId::DONE {
                        self.ended.push(*tag);
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

    #[inline(always)]
    pub(super) fn flush_all(&mut self) {
        if !self.owed.is_empty() {
            self.pay_credits();
        }
        if self.unflushed != 0 {
            self.flush_links();
        }
    }

    /// Flushes the links that have taken posts. Those of inline routes hold nothing back.
    fn flush_links(&mut self) {
        let mut unflushed = std::mem::take(&mut self.unflushed);
        while unflushed != 0 {
            self.links[unflushed.trailing_zeros() as usize].flush(&mut self.sink);
            unflushed &= unflushed - 1;
        }
        if !self.sink.is_empty() {
            self.take_flushed();
        }
    }

    /// Whether the request's sources may be reused. A failed request is drained too, and the group
    /// is then poisoned.
    pub fn is_drained(&mut self, request: RequestId) -> bool {
        self.requests.get(request).is_none()
    }

    #[inline(always)]
    fn check_room(&self) -> Result<()> {
        if self.requests.len() < self.config.max_requests {
            return Ok(());
        }
        Err(self.no_room())
    }

    #[cold]
    #[inline(never)]
    fn no_room(&self) -> Error {
        let (wanted, limit) = (self.requests.len() as u64 + 1, self.config.max_requests as u64);
        Error::Limit { what: "requests under way", wanted, limit }
    }

    /// Writes to one peer, without a flush. [`RequestId::DONE`] if that has ended already.
    #[inline(always)]
    pub(super) fn write_tagged(
        &mut self,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: &[Page],
        tag: u64,
    ) -> Result<RequestId> {
        let write = &PeerWrite { peer, pages };
        let Engine { peers, regions, counters, lanes, requests, config, .. } = self;
        let (ends, class) = counters::ends(counters, counter);
        let Some((target, bytes)) = Target::admit(peers, ends, regions, lanes, write, round) else {
            return Err(self.refused(write.peer, counter, round, write.pages));
        };
        if !target.path.inline && requests.len() >= config.max_requests {
            return Err(self.no_room());
        }
        let Entry { link, is_inline, is_direct, is_single, class, aim, value, .. } =
            target.enter(write, class, round, bytes);
        if let Some(trace) = &mut self.trace {
            record(trace, peer, aim.lane, value, pages);
        }
        if is_inline {
            let rider = self.owed.pop_if(|credit| credit.peer == peer).map(|credit| credit.lane);
            self.post_inline(link, aim, class, rider, pages);
            return Ok(RequestId::DONE);
        }
        if is_direct {
            return Ok(self.request(link, aim, class, pages, tag));
        }
        Ok(self.request_parts(link, aim, class, is_single, pages, tag))
    }

    /// Checks every write of a scatter and enters its round. If one is refused, none has entered.
    fn enter_all(
        &mut self,
        writes: &[PeerWrite<'_>],
        counter: CounterId,
        round_of: impl Fn(usize) -> u64,
    ) -> Result<()> {
        let Engine { peers, regions, counters, lanes, entries, .. } = self;
        let (ends, class) = counters::ends(counters, counter);
        entries.clear();
        entries.reserve(writes.len());
        for (place, write) in writes.iter().enumerate() {
            let round = round_of(place);
            let Some((target, bytes)) = Target::admit(peers, ends, regions, lanes, write, round)
            else {
                self.leave_all(writes, counter);
                return Err(self.refused(write.peer, counter, round, write.pages));
            };
            entries.push(target.enter(write, class, round, bytes));
        }
        if let Some(trace) = &mut self.trace {
            for (entry, write) in entries.iter().zip(writes) {
                record(trace, write.peer, entry.aim.lane, entry.value, write.pages);
            }
        }
        Ok(())
    }

    /// Takes back what the writes of `entries` have entered, the last one first.
    #[cold]
    fn leave_all(&mut self, writes: &[PeerWrite<'_>], counter: CounterId) {
        let Engine { peers, counters, entries, .. } = self;
        let (ends, _) = counters::ends(counters, counter);
        for (entry, write) in entries.drain(..).zip(writes).rev() {
            if let Some(target) = Target::of(peers, ends, write.peer) {
                target.leave(&entry, bytes_of(write.pages));
            }
        }
    }

    /// Why a write was refused.
    #[cold]
    #[inline(never)]
    fn refused(&mut self, peer: Rank, counter: CounterId, round: u64, pages: &[Page]) -> Error {
        let refusal = self
            .known_path(peer)
            .and_then(|_| pages.iter().try_for_each(|page| self.check_page(peer, page)))
            .and_then(|()| self.check_round(peer, counter, round));
        // All other checks have passed.
        refusal.err().unwrap_or(Error::NotLinked { counter })
    }

    /// A credit, on the peer's return lane, to leave with the next flush.
    pub(super) fn owe_credit(&mut self, peer: Rank, lane: Lane, ours: Lane) {
        self.peers[peer.0 as usize].totals.parts += 1;
        self.owed.push(Aim { peer, lane, credits: Some(ours) });
    }

    /// Posts the credits that are owed.
    fn pay_credits(&mut self) {
        if self.poison.get().is_none() {
            let mut next = 0;
            while let Some(&aim) = self.owed.get(next) {
                next += 1;
                let Some(Peer { path: Some(path), .. }) = self.peers.get(aim.peer.index()) else {
                    continue;
                };
                // Never behind writes that wait: a credit carries no bytes, and the peer waits for it.
                let (link, class) = (path.link, Class::Latency);
                if path.inline {
                    self.post_inline(link, aim, class, None, &[]);
                } else {
                    self.request(link, aim, class, &[], CREDIT_TAG);
                }
            }
        }
        self.owed.clear();
    }

    #[inline(always)]
    fn known_path(&self, peer: Rank) -> Result<Path> {
        match self.peers.get(peer.0 as usize) {
            Some(Peer { path: Some(path), .. }) => Ok(*path),
            _ => Err(Error::Unknown { what: "rank", number: peer.0.into() }),
        }
    }

    /// Posts a write over an inline route, which needs no request.
    #[inline(always)]
    fn post_inline(
        &mut self,
        link: u16,
        Aim { peer, lane, credits }: Aim,
        class: Class,
        rider: Option<Lane>,
        pages: &[Page],
    ) {
        let work = Work { token: 0, peer, lane, credits, rider, class, pages };
        let posted = self.links[usize::from(link)].post(&work, &mut self.sink);
        debug_assert!(!matches!(posted, Ok(Posted::InFlight | Posted::Full)));
        if let Err(why) = posted {
            self.write_failed(peer, &why);
        }
    }

    /// Posts a write of one part, behind which none waits. A part that its link ends at once leaves no
    /// request.
    #[inline(always)]
    fn request(
        &mut self,
        link: u16,
        aim: Aim,
        class: Class,
        pages: &[Page],
        tag: u64,
    ) -> RequestId {
        let Aim { peer, lane, credits } = aim;
        self.unflushed |= 1 << link;
        let Engine { requests, regions, links, sink, .. } = self;
        let vacant = requests.vacant();
        let token = Token::of(vacant.id, peer);
        let work = Work { token, peer, lane, credits, rider: None, class, pages };
        match links[usize::from(link)].post(&work, sink) {
            Ok(Posted::InFlight) => {
                let id = vacant.id;
                let Some((first, rest)) = pages.split_first() else {
                    vacant.open(tag, None);
                    return id;
                };
                let request = vacant.open(tag, Some(first.source));
                regions::borrow(regions, first.source);
                for page in rest {
                    if request.reads(page.source) {
                        regions::borrow(regions, page.source);
                    }
                }
                id
            }
            Ok(Posted::Done) => RequestId::DONE,
            refused => self.request_refused(aim, class, pages, tag, refused),
        }
    }

    /// A request whose only part its link did not take.
    #[cold]
    #[inline(never)]
    fn request_refused(
        &mut self,
        aim: Aim,
        class: Class,
        pages: &[Page],
        tag: u64,
        refused: Result<Posted, String>,
    ) -> RequestId {
        let (id, _) = self.requests.open(tag);
        self.note_posted(id, aim, class, pages, refused);
        self.end_submit(id, 0)
    }

    /// A request of several parts, or of one behind others.
    #[inline(never)]
    fn request_parts(
        &mut self,
        link: u16,
        aim: Aim,
        class: Class,
        is_single: bool,
        pages: &[Page],
        tag: u64,
    ) -> RequestId {
        let (id, _) = self.requests.open(tag);
        let mut under_way = UnderWay::new();
        let (is_inline, is_direct) = (false, false);
        // Its round has been entered.
        let (raises, value, started) = (1, 0, 0);
        let entry =
            Entry { link, is_inline, is_direct, is_single, class, aim, raises, value, started };
        self.start(id, &entry, pages, &mut under_way);
        self.end_submit(id, under_way.parts)
    }

    /// All writes of a request have been started, and so many parts are under way apart from those that
    /// were queued. [`RequestId::DONE`] if all have ended.
    fn end_submit(&mut self, id: RequestId, parts: u32) -> RequestId {
        if let Some(request) = self.requests.get(id) {
            request.left += parts;
            request.left -= 1;
        }
        if self.close_if_drained(id, false) { RequestId::DONE } else { id }
    }

    /// Posts one peer's write of a request as far as its link takes it; the rest waits in the peer's
    /// queue.
    #[inline(always)]
    fn start(&mut self, id: RequestId, entry: &Entry, pages: &[Page], under_way: &mut UnderWay) {
        let Entry { link, is_direct, is_single, class, aim, .. } = *entry;
        let Aim { peer, lane, credits } = aim;
        self.unflushed |= 1 << link;
        if !is_direct && self.start_queued(id, aim, class, is_single, pages) {
            return;
        }
        let token = Token::of(id, peer);
        let work = Work { token, peer, lane, credits, rider: None, class, pages };
        let posted = self.links[usize::from(link)].post(&work, &mut self.sink);
        let Ok(Posted::InFlight) = posted else {
            return self.note_posted(id, aim, class, pages, posted);
        };
        under_way.parts += 1;
        for page in pages {
            if under_way.source != page.source {
                under_way.source = page.source;
                self.borrow_for(id, page.source);
            }
        }
    }

    /// Starts a write through the peer's queue, if others wait there or it has several parts.
    #[inline(never)]
    fn start_queued(
        &mut self,
        id: RequestId,
        aim: Aim,
        class: Class,
        is_single: bool,
        pages: &[Page],
    ) -> bool {
        let waits = self.peers[aim.peer.index()].queue.is_waiting(class);
        if !waits && is_single {
            return false;
        }
        self.enqueue(id, aim, class, pages);
        if !waits {
            self.post_queued(aim.peer);
        }
        true
    }

    /// Notes what became of a part that is not under way.
    #[inline(never)]
    fn note_posted(
        &mut self,
        id: RequestId,
        aim: Aim,
        class: Class,
        pages: &[Page],
        posted: Result<Posted, String>,
    ) {
        match posted {
            Ok(Posted::Done | Posted::InFlight) => {}
            Ok(Posted::Full) => self.enqueue(id, aim, class, pages),
            Err(why) => self.fail_request(id, aim.peer, why),
        }
    }

    /// A request's sources stay where they are until it is closed.
    pub(super) fn borrow_for(&mut self, id: RequestId, source: RegionKey) {
        if self.requests.get(id).is_some_and(|request| request.reads(source)) {
            regions::borrow(&mut self.regions, source);
        }
    }

    pub(super) fn fail_request(&mut self, id: RequestId, peer: Rank, why: String) {
        if let Some(request) = self.requests.get(id) {
            request.fail(why, peer);
        }
    }

    /// A part under way has ended well.
    #[inline(always)]
    pub(super) fn part_done(&mut self, token: u64) {
        let (tag, source) = match self.requests.ended(token) {
            Part::Last { tag, source } => (tag, source),
            Part::Other { id, left: 0 } => return self.close(id, true),
            Part::Other { .. } => return,
            Part::Stray => return stray_completion(),
        };
        if tag != CREDIT_TAG {
            self.ended.push(tag);
            self.note_news();
        }
        if let Some(source) = source
            && regions::unborrow(&mut self.regions, source)
        {
            self.forget_if_free(source);
        }
    }

    /// A part under way has failed.
    #[cold]
    pub(super) fn part_failed(&mut self, token: u64, why: String) {
        let Some(id) = self.requests.failed(token, why) else { return stray_completion() };
        self.close_if_drained(id, true);
    }

    /// Closes a request of which every part has ended.
    pub(super) fn close_if_drained(&mut self, id: RequestId, report: bool) -> bool {
        let drained = self.requests.get(id).is_none_or(|request| request.left == 0);
        if drained {
            self.close(id, report);
        }
        drained
    }

    fn close(&mut self, id: RequestId, report: bool) {
        while let Some(source) = self.requests.get(id).and_then(|request| request.take_source()) {
            self.unborrow(source);
        }
        let Some(request) = self.requests.get(id) else { return };
        let (failure, callback) = request.take_outcome();
        let tag = request.tag;
        self.requests.close(id);
        // Nothing is lost toward a peer that has left a sound group: the sources are free, that is all.
        let failure = failure
            .filter(|failure| self.poison.get().is_some() || !self.poison.has_left(failure.peer));
        if report && failure.is_none() && tag != CREDIT_TAG {
            self.ended.push(tag);
        }
        if report && tag != CREDIT_TAG {
            self.epoch += 1;
            self.note_news();
        }
        if let Some(failure) = &failure {
            self.write_failed(failure.peer, &failure.why);
        }
        if let Some(callback) = callback {
            callback(failure.map_or(Ok(()), |failure| Err(failure.why)));
            // What the callback left behind may be the event loop's to run.
            self.note_news();
        }
    }

    #[cold]
    #[inline(never)]
    fn write_failed(&mut self, peer: Rank, why: &str) {
        self.peers[peer.0 as usize].totals.errors += 1;
        let detail = format!("a write to {peer} failed: {why}");
        self.poison.poison(Poison { kind: Cause::Failed, rank: Some(peer), detail });
    }
}

#[cold]
#[inline(never)]
fn stray_completion() {
    log::warn!("a link completed a part that was not under way");
}

/// Adds a write to the trace.
#[cold]
#[inline(never)]
fn record(trace: &mut Trace, peer: Rank, lane: Lane, value: u64, pages: &[Page]) {
    let (lane, bytes) = (lane.id().get(), bytes_of(pages));
    trace.write(WriteRecord { at: clock::now(), peer, lane, value, bytes });
}

/// Parts of a request under way, as its submit counts them.
struct UnderWay {
    parts: u32,
    /// The region that the last of them reads.
    source: RegionKey,
}

impl UnderWay {
    fn new() -> UnderWay {
        // No region has this key.
        UnderWay { parts: 0, source: RegionKey(u32::MAX) }
    }
}
