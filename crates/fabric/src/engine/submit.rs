//! From a request to parts with a link.
//!
//! Everything is checked before anything is posted, so a refused request has no effect. A part that its
//! link takes and ends at once (shm) leaves no trace here; what is still under way when submit returns is
//! a [`crate::request::Request`]. `queue.rs` keeps what found a full queue.

use super::counters::{self, Counter, End, Remote};
use super::regions::{self, Local, is_inside};
use super::{Engine, Path, Peer};
use crate::clock;
use crate::driver::{Ask, Requests};
use crate::error::{Error, Result};
use crate::inbox::{Descriptor, Operation, Outcomes};
use crate::lane_table::LaneTable;
use crate::link::{Posted, Work};
use crate::request::{Aim, Callback, Token};
use crate::trace::WriteRecord;
use crate::types::{Class, CounterId, Lane, Page, RegionKey, RequestId, bytes_of};
use std::sync::Arc;
use weft_control::{Cause, Poison, Rank};

/// The tag of credits, whose completion nothing waits for.
pub(super) const CREDIT_TAG: u64 = u64::MAX;

/// Where a slice begins. An offset that does not fit is out of range, and refused as such.
fn at(offset: u64, slice: u64, stride: u64) -> u64 {
    offset.saturating_add(slice.saturating_mul(stride))
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
        if let ([write], None) = (writes, &done) {
            return self.write(write.peer, counter, round, write.pages);
        }
        self.check()?;
        for write in writes {
            let Engine { peers, regions, counters, lanes, .. } = self;
            let target = Target::of(peers, counters::get(counters, counter), write.peer);
            let admitted = target.and_then(|t| t.admits(regions, lanes, round, write.pages));
            if admitted.is_none() {
                return Err(self.refused(write.peer, counter, round, write.pages));
            }
        }
        self.check_room()?;
        let (id, request) = self.requests.open(0);
        request.call_at_end(done);
        for write in writes {
            let Engine { peers, counters, .. } = self;
            let target = Target::of(peers, counters::get(counters, counter), write.peer);
            let Some(target) = target else { continue };
            let entry = target.enter(write.peer, round, write.pages, bytes_of(write.pages));
            self.record(&entry, write.pages);
            self.start(id, &entry, write.pages);
        }
        let id = self.end_submit(id);
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

    /// Submits a descriptor. Its outcome, unless it is refused here, goes to `outcomes`.
    ///
    /// # Errors
    /// As [`Engine::write`] and [`Engine::credit`]. Nothing was written then, and `outcomes` is not
    /// called.
    pub(crate) fn submit_one(
        &mut self,
        descriptor: &Descriptor,
        outcomes: &Arc<Outcomes>,
    ) -> Result<()> {
        let (peer, counter, tag) = (descriptor.peer, descriptor.counter, descriptor.tag);
        if descriptor.operation == Operation::Credit {
            self.credit(peer, counter)?;
            self.flush_all();
            outcomes(tag, Ok(()));
            return Ok(());
        }
        let mut pages = std::mem::take(&mut self.slices);
        pages.clear();
        let slices = if descriptor.length == 0 { 0 } else { u64::from(descriptor.count) };
        pages.extend((0..slices).map(|slice| Page {
            source: descriptor.source,
            source_offset: at(descriptor.source_offset, slice, descriptor.source_stride),
            destination: descriptor.destination,
            destination_offset: at(
                descriptor.destination_offset,
                slice,
                descriptor.destination_stride,
            ),
            length: descriptor.length,
        }));
        let outcomes = outcomes.clone();
        let done: Callback = Box::new(move |result| outcomes(tag, result));
        let write = [PeerWrite { peer, pages: &pages }];
        let result = self.scatter(&write, counter, descriptor.round, Some(done));
        self.slices = pages;
        result.map(drop)
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
        let has_room = self.requests.len() < self.config.max_requests;
        let Engine { peers, regions, counters, lanes, .. } = self;
        let Some(target) = Target::of(peers, counters::get(counters, counter), peer) else {
            return Err(self.refused(peer, counter, round, pages));
        };
        let Some((target, bytes)) = target.admits(regions, lanes, round, pages) else {
            return Err(self.refused(peer, counter, round, pages));
        };
        if !has_room && !target.path.inline {
            return Err(self.no_room());
        }
        let entry = target.enter(peer, round, pages, bytes);
        self.record(&entry, pages);
        Ok(self.launch(&entry, pages, tag))
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

    /// Adds a write to the trace.
    #[inline(always)]
    fn record(&mut self, entry: &Entry, pages: &[Page]) {
        if let Some(trace) = &mut self.trace {
            let Entry { aim: Aim { peer, lane, .. }, value, .. } = *entry;
            let (lane, bytes) = (lane.id().get(), bytes_of(pages));
            trace.write(WriteRecord { at: clock::now(), peer, lane, value, bytes });
        }
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
                if let Ok(path) = self.known_path(aim.peer) {
                    let class = Class::Latency;
                    let entry = Entry { path, aim, class, raises: 1, value: 0, has_queue: true };
                    if path.inline {
                        self.post_inline(&entry, None, &[]);
                    } else {
                        self.request(&entry, &[], CREDIT_TAG);
                    }
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

    /// Posts a write to one peer. An inline route needs no request, and neither does a part that its link
    /// ends at once.
    #[inline(always)]
    fn launch(&mut self, entry: &Entry, pages: &[Page], tag: u64) -> RequestId {
        let Entry { path, aim: Aim { peer, lane, credits }, class, .. } = *entry;
        if path.inline {
            let rider = self.owed.pop_if(|credit| credit.peer == peer).map(|credit| credit.lane);
            self.post_inline(entry, rider, pages);
            return RequestId::DONE;
        }
        if entry.has_queue || entry.raises != 1 {
            return self.request(entry, pages, tag);
        }
        self.unflushed |= 1 << path.link;
        let Engine { requests, regions, links, sink, .. } = self;
        let token = Token::of(requests.next(), peer);
        let work = Work { token, peer, lane, credits, rider: None, class, pages };
        match links[usize::from(path.link)].post(&work, sink) {
            Ok(Posted::InFlight) => {
                let (id, request) = requests.open(tag);
                for page in pages {
                    if request.reads(page.source) {
                        regions::borrow(regions, page.source);
                    }
                }
                id
            }
            Ok(Posted::Done) => RequestId::DONE,
            other => self.request_with(entry, pages, tag, other),
        }
    }

    #[inline(always)]
    fn post_inline(&mut self, entry: &Entry, rider: Option<Lane>, pages: &[Page]) {
        let Entry { path, aim: Aim { peer, lane, credits }, class, .. } = *entry;
        let link = &mut self.links[usize::from(path.link)];
        let work = Work { token: 0, peer, lane, credits, rider, class, pages };
        let posted = link.post(&work, &mut self.sink);
        debug_assert!(!matches!(posted, Ok(Posted::InFlight | Posted::Full)));
        if let Err(why) = posted {
            self.write_failed(peer, &why);
        }
    }

    /// Posts a write to one peer as a request, which is closed at once if its parts end at once.
    #[inline(never)]
    fn request(&mut self, entry: &Entry, pages: &[Page], tag: u64) -> RequestId {
        let (id, _) = self.requests.open(tag);
        self.start(id, entry, pages);
        self.end_submit(id)
    }

    /// A request whose only part its link did not take: that waits, or has failed.
    #[cold]
    #[inline(never)]
    fn request_with(
        &mut self,
        entry: &Entry,
        pages: &[Page],
        tag: u64,
        posted: Result<Posted, String>,
    ) -> RequestId {
        let (id, _) = self.requests.open(tag);
        self.note_posted(id, entry, pages, posted);
        self.end_submit(id)
    }

    /// All writes of a request have been started. [`RequestId::DONE`] if all have ended.
    fn end_submit(&mut self, id: RequestId) -> RequestId {
        if let Some(request) = self.requests.get(id) {
            request.left -= 1;
        }
        if self.close_if_drained(id, false) { RequestId::DONE } else { id }
    }

    /// Posts one peer's write of a request as far as its link takes it; the rest waits in the peer's
    /// queue.
    #[inline(always)]
    fn start(&mut self, id: RequestId, entry: &Entry, pages: &[Page]) {
        let Entry { path, aim: Aim { peer, lane, credits }, class, .. } = *entry;
        if path.inline {
            return self.post_inline(entry, None, pages);
        }
        self.unflushed |= 1 << path.link;
        if (entry.has_queue || entry.raises != 1) && self.start_queued(id, entry, pages) {
            return;
        }
        let token = Token::of(id, peer);
        let work = Work { token, peer, lane, credits, rider: None, class, pages };
        let posted = self.links[usize::from(path.link)].post(&work, &mut self.sink);
        if let Ok(Posted::InFlight) = posted {
            let Engine { requests, regions, .. } = self;
            let Some(request) = requests.get(id) else { return };
            request.left += 1;
            for page in pages {
                if request.reads(page.source) {
                    regions::borrow(regions, page.source);
                }
            }
        } else {
            self.note_posted(id, entry, pages, posted);
        }
    }

    /// Starts a write through the peer's queue, if others wait there or it has several parts.
    #[inline(never)]
    fn start_queued(&mut self, id: RequestId, entry: &Entry, pages: &[Page]) -> bool {
        let Entry { aim, class, .. } = *entry;
        let waits = self.peers[aim.peer.index()].queue.is_waiting(class);
        if waits || entry.raises != 1 {
            self.enqueue(id, aim, class, pages);
        }
        if !waits && entry.raises != 1 {
            self.post_queued(aim.peer);
        }
        waits || entry.raises != 1
    }

    /// Notes what became of a part that is not under way.
    #[inline(never)]
    fn note_posted(
        &mut self,
        id: RequestId,
        entry: &Entry,
        pages: &[Page],
        posted: Result<Posted, String>,
    ) {
        match posted {
            Ok(Posted::Done | Posted::InFlight) => {}
            Ok(Posted::Full) => self.enqueue(id, entry.aim, entry.class, pages),
            Err(why) => self.fail_request(id, entry.aim.peer, why),
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
        let Engine { requests, regions, ended, .. } = self;
        let Some((id, request)) = requests.ended(token) else { return stray_completion() };
        if request.left > 0 {
            return;
        }
        let Some(source) = request.plain() else { return self.close(id, true) };
        let tag = request.tag;
        requests.close(id);
        if tag != CREDIT_TAG {
            ended.push(tag);
        }
        if let Some(source) = source
            && regions::unborrow(regions, source)
        {
            self.forget_if_free(source);
        }
    }

    /// A part under way has failed.
    #[cold]
    pub(super) fn part_failed(&mut self, token: u64, why: String) {
        let Some((id, request)) = self.requests.ended(token) else { return stray_completion() };
        request.fail(why, Token::peer(token));
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
        if let Some(failure) = &failure {
            self.write_failed(failure.peer, &failure.why);
        }
        if let Some(callback) = callback {
            callback(failure.map_or(Ok(()), |failure| Err(failure.why)));
            // What the callback left behind may be the event loop's to run.
            self.news = true;
            self.ring_event_loop();
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

/// The two ends of a write: the peer, and its end of a counter.
struct Target<'a> {
    path: Path,
    state: &'a mut Peer,
    remote: &'a mut Remote,
    /// The credit lane, and its value when it was last read.
    credit: Lane,
    credits: &'a mut u64,
    window: u32,
    class: Class,
}

/// A write that has entered its round and is yet to be posted.
struct Entry {
    path: Path,
    aim: Aim,
    class: Class,
    /// Its parts.
    raises: u64,
    /// Raises of the peer's data lanes in all, those of this write included.
    value: u64,
    /// Some write to this peer may be waiting for its link.
    has_queue: bool,
}

impl<'a> Target<'a> {
    #[inline(always)]
    fn of(peers: &'a mut [Peer], counter: Option<&'a mut Counter>, peer: Rank) -> Option<Self> {
        let Counter { ends, class, .. } = counter?;
        let state = peers.get_mut(peer.0 as usize)?;
        let End { remote, credit, credits, window, .. } =
            ends.get_mut(peer.0 as usize)?.as_mut()?;
        let (path, remote) = (state.path?, remote.as_mut()?);
        let (credit, window, class) = (*credit, *window, *class);
        Some(Target { path, state, remote, credit, credits, window, class })
    }

    /// Checks a write, of which nothing is changed yet. Returns its bytes.
    #[inline(always)]
    fn admits(
        mut self,
        regions: &[Option<Local>],
        lanes: &LaneTable,
        round: u64,
        pages: &[Page],
    ) -> Option<(Self, u64)> {
        let mut bytes = 0_u64;
        for page in pages {
            let local = regions.get(page.source.0 as usize)?.as_ref()?;
            let readable = local.may_read(self.path.link, page.source_offset, page.length);
            let length = self.state.length_of(page.destination)?;
            if !readable || !is_inside(page.destination_offset, page.length, length) {
                return None;
            }
            bytes = bytes.saturating_add(page.length);
        }
        self.is_open(lanes, round).then_some((self, bytes))
    }

    /// Whether a round may be written. One that was entered may have been credited since; a new one needs
    /// a look at the lane only if the credits known do not reach it.
    #[inline(always)]
    fn is_open(&mut self, lanes: &LaneTable, round: u64) -> bool {
        let window = u64::from(self.window);
        if round < self.remote.started || round >= *self.credits + window {
            *self.credits = lanes.value(self.credit.id());
        }
        round.wrapping_sub(*self.credits) < window
    }

    /// Enters a round that was checked.
    #[inline(always)]
    fn enter(self, peer: Rank, round: u64, pages: &[Page], bytes: u64) -> Entry {
        let Target { path, state, remote, window, class, .. } = self;
        let is_single = pages.len() <= path.single_pages && bytes <= path.single_bytes;
        let raises = if is_single { 1 } else { state.count_parts(pages) };
        remote.started = remote.started.max(round + 1);
        remote.raised += raises;
        let (lane, value) = (End::remote_data(remote, window, round), remote.raised);
        state.totals.bytes += bytes;
        state.totals.parts += raises;
        let (aim, has_queue) = (Aim { peer, lane, credits: None }, state.queue.is_listed());
        Entry { path, aim, class, raises, value, has_queue }
    }
}

impl Peer {
    /// Parts of a write to the peer, by the route's rule.
    #[inline(never)]
    fn count_parts(&self, pages: &[Page]) -> u64 {
        let route = self.route.as_ref();
        route.map_or(1, |route| route.parts.count(pages.iter().map(|page| page.length)))
    }
}
