//! From a request to parts with a link.
//!
//! Everything is checked before anything is posted, so a refused request has no effect. A part that its
//! link takes and ends at once (shm) leaves no trace here; what is still under way when submit returns is
//! a [`crate::request::Request`]. `queue.rs` keeps what found a full queue.

use super::{Engine, Path, Peer, regions};
use crate::clock;
use crate::driver::{Ask, Requests};
use crate::error::{Error, Result};
use crate::inbox::{Descriptor, Operation, Outcomes};
use crate::link::{Posted, Work};
use crate::request::{Aim, Callback, Failure, Token};
use crate::trace::WriteRecord;
use crate::types::{Class, CounterId, Lane, Page, RegionKey, RequestId, bytes_of};
use std::sync::Arc;
use weft_control::{Cause, Poison, Rank};

/// The tag of credits, whose completion nothing waits for.
const CREDIT_TAG: u64 = u64::MAX;

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
            let path = self.known_path(write.peer)?;
            self.check_pages(path, write.peer, write.pages)?;
            self.check_round(write.peer, counter, round)?;
        }
        self.check_room()?;
        let (id, request) = self.requests.open();
        request.callback = done;
        for write in writes {
            let path = self.known_path(write.peer)?;
            let (aim, class, raises) = self.aim(path, write.peer, counter, round, write.pages)?;
            self.start(id, path, aim, class, write.pages);
            self.tally(write.peer, raises, write.pages);
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

    pub(super) fn flush_all(&mut self) {
        self.pay_credits();
        for link in &mut self.links {
            link.flush(&mut self.sink);
        }
    }

    /// Whether the request's sources may be reused. A failed request is drained too, and the group
    /// is then poisoned.
    pub fn is_drained(&mut self, request: RequestId) -> bool {
        request == RequestId::DONE || self.requests.get(request).is_none()
    }

    #[inline]
    fn check_pages(&self, path: Path, peer: Rank, pages: &[Page]) -> Result<()> {
        for page in pages {
            self.check_source(path, page.source, page.source_offset, page.length)?;
            let (offset, length) = (page.destination_offset, page.length);
            self.check_destination(peer, page.destination, offset, length)?;
        }
        Ok(())
    }

    fn check_room(&self) -> Result<()> {
        let limit = self.config.max_requests.min(Token::PLACES) as u64;
        let wanted = self.requests.len() as u64 + 1;
        if wanted > limit {
            return Err(Error::Limit { what: "requests under way", wanted, limit });
        }
        Ok(())
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
        let path = self.known_path(peer)?;
        self.check_pages(path, peer, pages)?;
        if !path.inline {
            self.check_room()?;
        }
        let (aim, class, raises) = self.aim(path, peer, counter, round, pages)?;
        let id = self.launch(path, aim, class, pages, tag);
        // The peer need not wait for this.
        self.tally(peer, raises, pages);
        Ok(id)
    }

    /// Enters the round; returns where the write goes, its class, and how often it raises its lane. The
    /// last check: what fails here or before has written nothing.
    // What it returns costs more to hand over than to make, so it is inlined, as is `launch`.
    #[inline(always)]
    fn aim(
        &mut self,
        path: Path,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: &[Page],
    ) -> Result<(Aim, Class, u64)> {
        let raises = if path.whole { 1 } else { self.count_parts(peer, pages) };
        let (remote, lane, class) = self.enter_round(peer, counter, round)?;
        remote.raised += raises;
        let value = remote.raised;
        if let Some(trace) = &mut self.trace {
            let (lane, bytes) = (lane.id().get(), bytes_of(pages));
            trace.write(WriteRecord { at: clock::now(), peer, lane, value, bytes });
        }
        Ok((Aim { peer, lane, credits: None }, class, raises))
    }

    fn tally(&mut self, peer: Rank, raises: u64, pages: &[Page]) {
        let totals = &mut self.peers[peer.0 as usize].totals;
        totals.bytes += bytes_of(pages);
        totals.parts += raises;
    }

    /// A credit, on the peer's return lane, to leave with the next flush.
    pub(super) fn owe_credit(&mut self, peer: Rank, lane: Lane, ours: Lane) {
        self.peers[peer.0 as usize].totals.parts += 1;
        self.owed.push(Aim { peer, lane, credits: Some(ours) });
    }

    /// Posts the credits that are owed.
    fn pay_credits(&mut self) {
        if self.owed.is_empty() {
            return;
        }
        let mut owed = std::mem::take(&mut self.owed);
        if self.poison.get().is_none() {
            for aim in owed.drain(..) {
                if let Ok(path) = self.known_path(aim.peer) {
                    self.launch(path, aim, Class::Latency, &[], CREDIT_TAG);
                }
            }
        }
        owed.clear();
        self.owed = owed;
    }

    #[inline(always)]
    fn known_path(&self, peer: Rank) -> Result<Path> {
        match self.peers.get(peer.0 as usize) {
            Some(Peer { path: Some(path), .. }) => Ok(*path),
            _ => Err(Error::Unknown { what: "rank", number: peer.0.into() }),
        }
    }

    /// Parts of a write to a peer, by the route's rule.
    pub(super) fn count_parts(&self, peer: Rank, pages: &[Page]) -> u64 {
        let route = self.peers[peer.0 as usize].route.as_ref();
        route.map_or(1, |route| route.parts.count(pages.iter().map(|page| page.length)))
    }

    /// Posts a write to one peer. An inline route needs no request.
    #[inline(always)]
    fn launch(
        &mut self,
        path: Path,
        aim: Aim,
        class: Class,
        pages: &[Page],
        tag: u64,
    ) -> RequestId {
        if path.inline {
            self.post_inline(path, aim, class, pages);
            return RequestId::DONE;
        }
        self.request(path, aim, class, pages, tag)
    }

    #[inline(always)]
    fn post_inline(&mut self, path: Path, aim: Aim, class: Class, pages: &[Page]) {
        let Aim { peer, lane, credits } = aim;
        let rider = self.owed.pop_if(|credit| credit.peer == peer).map(|credit| credit.lane);
        let link = &mut self.links[usize::from(path.link)];
        let work = Work { token: 0, peer, lane, credits, rider, class, pages };
        let posted = link.post(&work, &mut self.sink);
        debug_assert!(!matches!(posted, Ok(Posted::InFlight | Posted::Full)));
        if let Err(why) = posted {
            self.write_failed(peer, &why);
        }
    }

    /// Posts a write to one peer as a request, which is closed at once if its only part ends at once.
    fn request(
        &mut self,
        path: Path,
        aim: Aim,
        class: Class,
        pages: &[Page],
        tag: u64,
    ) -> RequestId {
        let (id, request) = self.requests.open();
        request.tag = tag;
        self.start(id, path, aim, class, pages);
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
    fn start(&mut self, id: RequestId, path: Path, aim: Aim, class: Class, pages: &[Page]) {
        if path.inline {
            return self.post_inline(path, aim, class, pages);
        }
        let Aim { peer, lane, credits } = aim;
        if self.peers[peer.0 as usize].queue.is_waiting(class) {
            return self.enqueue(id, aim, class, pages);
        }
        let is_one_part = path.whole || pages.is_empty() || self.count_parts(peer, pages) == 1;
        if !is_one_part {
            self.enqueue(id, aim, class, pages);
            return self.post_queued(peer);
        }
        let token = Token::of(id, peer);
        let work = Work { token, peer, lane, credits, rider: None, class, pages };
        match self.links[usize::from(path.link)].post(&work, &mut self.sink) {
            Ok(Posted::Done) => {}
            Ok(Posted::InFlight) => {
                let Engine { requests, regions, .. } = self;
                let Some(request) = requests.get(id) else { return };
                request.left += 1;
                for page in pages {
                    if request.reads(page.source) {
                        regions::borrow(regions, page.source);
                    }
                }
            }
            Ok(Posted::Full) => self.enqueue(id, aim, class, pages),
            Err(why) => self.fail_request(id, peer, why),
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
            request.failure.get_or_insert(Failure { why, peer });
        }
    }

    /// Closes a request of which every part has ended.
    pub(super) fn close_if_drained(&mut self, id: RequestId, report: bool) -> bool {
        let Some(request) = self.requests.get(id) else { return true };
        if request.left > 0 {
            return false;
        }
        let (failure, callback) = (request.failure.take(), request.callback.take());
        let tag = request.tag;
        let mut sources = std::mem::take(&mut request.sources);
        for source in sources.drain(..) {
            self.unborrow(source);
        }
        if let Some(request) = self.requests.get(id) {
            request.sources = sources;
        }
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
        true
    }

    fn write_failed(&mut self, peer: Rank, why: &str) {
        self.peers[peer.0 as usize].totals.errors += 1;
        let detail = format!("a write to {peer} failed: {why}");
        self.poison.poison(Poison { kind: Cause::Failed, rank: Some(peer), detail });
    }
}
