//! From a request to parts with a provider.
//!
//! Everything is checked before anything is posted, so a refused request has done nothing. A part
//! that its provider takes and ends at once (shm) leaves no trace here; only what is still under way
//! when submit returns becomes a [`crate::request::Request`].

use super::{Engine, Route};
use crate::clock;
use crate::driver::{Ask, Requests};
use crate::error::{Error, Result};
use crate::provider::{Posted, Provider, Sink, Work};
use crate::request::{Aim, Callback, PostedPart, Target, Token};
use crate::trace::WriteRecord;
use crate::types::{CounterId, Lane, Page, RequestId};
use weft_control::{Cause, Poison, Rank};

/// The tag of credits, which nobody waits for.
const CREDIT_TAG: u64 = u64::MAX;

/// One write of a scatter: a peer and what goes to it.
#[derive(Clone, Debug)]
pub struct PeerWrite<'a> {
    /// To whom.
    pub peer: Rank,
    /// What; a signal if empty.
    pub pages: &'a [Page],
}

impl Engine {
    /// Writes `pages` to `peer` and raises its `counter` by the parts of that write, in `round`.
    ///
    /// One page is a plain write, several are a paged write, none is a signal. Returns before
    /// the bytes have arrived; the sources stay borrowed until [`Engine::is_drained`].
    ///
    /// # Errors
    /// [`Error::NoCredit`] if the peer has not released the round before; [`Error::OutOfRange`],
    /// [`Error::Unknown`], [`Error::Limit`], [`Error::Poisoned`]. Nothing was written then.
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

    /// Several peers' writes under one request. `done` is called once, by whoever makes progress,
    /// when every source may be reused or the request has failed; from within this call if that is now.
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
            let route = self.known_route(write.peer)?;
            self.check_pages(&route, write.peer, write.pages)?;
            self.enter_round(write.peer, counter, round)?;
        }
        self.check_room()?;
        let (id, _) = self.requests.open();
        for write in writes {
            let route = self.known_route(write.peer)?;
            let (aim, raises) = self.aim(route, write.peer, counter, round, write.pages)?;
            self.add(id, route, aim, write.pages);
            self.tally(write.peer, raises, write.pages);
        }
        if let Some(request) = self.requests.get(id) {
            (request.tag, request.callback) = (0, done);
        }
        let id = self.post_new(id, None);
        self.flush_all();
        Ok(id)
    }

    /// Does everything that a driver asked for, and empties `requests`.
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
                Ask::Credit { peer, counter } => self.credit(*peer, *counter)?,
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

    pub(super) fn flush_all(&mut self) {
        self.pay_credits();
        for provider in &mut self.providers {
            provider.flush(&mut self.sink);
        }
    }

    /// Whether the request's sources may be reused. A failed request is drained too, and the group
    /// is then poisoned.
    pub fn is_drained(&mut self, request: RequestId) -> bool {
        request == RequestId::DONE || self.requests.get(request).is_none()
    }

    fn check_pages(&self, route: &Route, peer: Rank, pages: &[Page]) -> Result<()> {
        for page in pages {
            self.check_source(route, page.source, page.source_offset, page.length)?;
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
    fn write_tagged(
        &mut self,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: &[Page],
        tag: u64,
    ) -> Result<RequestId> {
        let route = self.known_route(peer)?;
        self.check_pages(&route, peer, pages)?;
        if !route.inline {
            self.check_room()?;
        }
        let (aim, raises) = self.aim(route, peer, counter, round, pages)?;
        let id = self.launch(route, aim, pages, tag);
        // The peer need not wait for this.
        self.tally(peer, raises, pages);
        Ok(id)
    }

    /// Enters the round and says where a write goes and how often it raises its lane. The last check:
    /// what fails here or before has written nothing.
    // What it returns costs more to hand over than to make, so it is inlined, as is `launch`.
    #[inline(always)]
    fn aim(
        &mut self,
        route: Route,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: &[Page],
    ) -> Result<(Aim, u64)> {
        let raises = route.parts.count(pages.iter().map(|page| page.length));
        let remote = self.enter_round(peer, counter, round)?;
        remote.raised += raises;
        let (lane, value) = (remote.data, remote.raised);
        if let Some(trace) = &mut self.trace {
            let (lane, bytes) = (lane.id().get(), bytes_of(pages));
            trace.write(WriteRecord { at: clock::now(), peer, lane, value, bytes });
        }
        Ok((Aim { peer, lane, credits: None }, raises))
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
                if let Some(route) = self.route(aim.peer) {
                    self.launch(route, aim, &[], CREDIT_TAG);
                }
            }
        }
        owed.clear();
        self.owed = owed;
    }

    fn known_route(&self, peer: Rank) -> Result<Route> {
        self.route(peer).ok_or_else(|| Error::Unknown { what: "rank", number: peer.0.into() })
    }

    /// Posts a write to one peer. A provider that ends posts inline sees it at once, with no request.
    #[inline(always)]
    fn launch(&mut self, route: Route, aim: Aim, pages: &[Page], tag: u64) -> RequestId {
        if !route.inline {
            return self.request(&route, aim, pages, tag);
        }
        let Aim { peer, lane, credits } = aim;
        let rider = self.owed.pop_if(|credit| credit.peer == peer).map(|credit| credit.lane);
        let provider = &mut self.providers[route.index];
        let work = Work { token: 0, peer, lane, credits, rider, pages };
        let posted = provider.post(&work, &mut self.sink);
        debug_assert!(!matches!(posted, Ok(Posted::InFlight | Posted::Full)));
        if let Err(why) = posted {
            self.write_failed(Some((peer, lane)), &why);
        }
        RequestId::DONE
    }

    /// Posts a write to one peer as a request, which is forgotten if its only part ends at once.
    fn request(&mut self, route: &Route, aim: Aim, pages: &[Page], tag: u64) -> RequestId {
        let (id, _) = self.requests.open();
        let is_one_part = pages.len() <= 1 && route.parts.count_contiguous(bytes_of(pages)) == 1;
        let first = is_one_part.then(|| {
            offer(&mut self.providers, &mut self.sink, route, aim, Token::of(id, 0), pages)
        });
        if let Some(PostedPart::Done) = first {
            self.requests.close(id);
            return RequestId::DONE;
        }
        self.add(id, *route, aim, pages);
        if let Some(request) = self.requests.get(id) {
            request.tag = tag;
        }
        self.post_new(id, first)
    }

    fn add(&mut self, id: RequestId, route: Route, aim: Aim, pages: &[Page]) {
        for page in pages {
            self.borrow(page.source);
        }
        if let Some(request) = self.requests.get(id) {
            let begin = request.pages.len();
            request.pages.extend_from_slice(pages);
            let (pages, rule) = (begin..request.pages.len(), route.parts);
            request.targets.push(Target { aim, rule, pages, first_part: u32::MAX });
        }
    }

    fn post_new(&mut self, id: RequestId, first: Option<PostedPart>) -> RequestId {
        if !self.post(id, first) {
            self.posting.push(id);
        }
        if self.close_if_drained(id, false) { RequestId::DONE } else { id }
    }

    /// Offers a request's remaining parts; whether all were taken. `first` is what became of the first of
    /// them, if it was offered already.
    pub(super) fn post(&mut self, id: RequestId, mut first: Option<PostedPart>) -> bool {
        let Engine { requests, providers, peers, sink, .. } = self;
        let Some(request) = requests.get(id) else { return true };
        request.post(|target, part, pages| {
            if let Some(posted) = first.take() {
                return posted;
            }
            match peers[target.aim.peer.0 as usize].route {
                Some(route) => {
                    offer(providers, sink, &route, target.aim, Token::of(id, part), pages)
                }
                None => PostedPart::Failed("the peer has no route".into()),
            }
        })
    }

    /// Ends a request of which no provider holds a part any more.
    pub(super) fn close_if_drained(&mut self, id: RequestId, report: bool) -> bool {
        let Some(request) = self.requests.get(id) else { return true };
        if !request.is_drained() {
            return false;
        }
        let outcome = request.outcome();
        let callback = request.callback.take();
        let tag = request.tag;
        let pages = std::mem::take(&mut request.pages);
        for page in &pages {
            self.unborrow(page.source);
        }
        if let Some(request) = self.requests.get(id) {
            request.pages = pages;
        }
        self.requests.close(id);
        if report && outcome.is_ok() && tag != CREDIT_TAG {
            self.ended.push(tag);
        }
        if let Err(failure) = &outcome {
            self.write_failed(failure.target, &failure.why);
        }
        if let Some(callback) = callback {
            callback(outcome.map_err(|failure| failure.why));
        }
        true
    }

    fn write_failed(&mut self, target: Option<(Rank, Lane)>, why: &str) {
        let Some((peer, lane)) = target else { return };
        self.peers[peer.0 as usize].totals.errors += 1;
        let detail = format!("a write to {peer} on its lane {} failed: {why}", lane.id().get());
        self.poison.poison(Poison { kind: Cause::Failed, rank: Some(peer), detail });
    }
}

/// Offers one part to the provider of its route.
fn offer(
    providers: &mut [Box<dyn Provider>],
    sink: &mut Sink,
    route: &Route,
    Aim { peer, lane, credits }: Aim,
    token: u64,
    pages: &[Page],
) -> PostedPart {
    let work = Work { token, peer, lane, credits, rider: None, pages };
    match providers[route.index].post(&work, sink) {
        Ok(Posted::Done) => PostedPart::Done,
        Ok(Posted::InFlight) => PostedPart::InFlight,
        Ok(Posted::Full) => PostedPart::Full,
        Err(why) => PostedPart::Failed(why),
    }
}

fn bytes_of(pages: &[Page]) -> u64 {
    pages.iter().map(|page| page.length).sum()
}
