//! Parts handed to links. `queue.rs` keeps what found a full queue.
//!
//! A part that its link takes and ends at once (shm) leaves no trace here; what is still under way when
//! submit returns is a [`crate::request::Request`].

use super::counters::{self, Counter, End};
use super::submit::{PeerWrite, record};
use super::target::Target;
use super::{Engine, Path, Peer};
use crate::link::{Posted, Scatter, ScatterPart, Work};
use crate::request::{Aim, Tag, Token};
use crate::types::{Class, CounterId, Lane, Page, RegionKey, RequestId};
use weft_control::{Cause, Poison, Rank};

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

impl Engine {
    /// Posts a write over an inline route, which needs no request. An error is yet to poison the group.
    #[inline(always)]
    pub(super) fn post_inline(
        &mut self,
        link: u16,
        Aim { peer, lane, credits }: Aim,
        class: Class,
        rider: Option<Lane>,
        pages: &[Page],
    ) -> Result<(), String> {
        let work = Work { token: 0, peer, lane, credits, rider, class, pages };
        let posted = self.links[usize::from(link)].post(&work, &mut self.sink);
        debug_assert!(!matches!(posted, Ok(Posted::InFlight | Posted::Full)));
        posted.map(|_| ())
    }

    /// Posts a write of one part, behind which none waits; its link is yet to be flushed. A part that its link
    /// ends at once leaves no request. A `rider` that it could not take along is owed again.
    #[inline(always)]
    pub(super) fn request(
        &mut self,
        link: u16,
        aim: Aim,
        class: Class,
        rider: Option<Aim>,
        pages: &[Page],
        tag: Tag,
    ) -> RequestId {
        let Aim { peer, lane, credits } = aim;
        let Engine { requests, links, sink, .. } = self;
        let vacant = requests.vacant();
        let token = Token::of(vacant.id, peer);
        let riding = rider.map(|credit| credit.lane);
        let work = Work { token, peer, lane, credits, rider: riding, class, pages };
        match links[usize::from(link)].post(&work, sink) {
            Ok(Posted::InFlight) => {
                let id = vacant.id;
                let Some((first, rest)) = pages.split_first() else {
                    vacant.open(tag, peer, None);
                    return id;
                };
                let request = vacant.open(tag, peer, Some(first.source));
                for page in rest {
                    request.reads(page.source);
                }
                id
            }
            Ok(Posted::Done) => RequestId::DONE,
            refused => {
                self.owed.extend(rider);
                self.request_refused(aim, class, pages, tag, refused)
            }
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
        tag: Tag,
        refused: Result<Posted, String>,
    ) -> RequestId {
        let (id, _) = self.requests.open(tag, aim.peer);
        self.note_posted(id, aim, class, pages, refused);
        self.end_submit(id)
    }

    /// A request of several parts, or of one behind others.
    #[inline(never)]
    pub(super) fn request_parts(
        &mut self,
        aim: Aim,
        class: Class,
        is_single: bool,
        pages: &[Page],
        tag: Tag,
    ) -> RequestId {
        let (id, _) = self.requests.open(tag, aim.peer);
        let mut under_way = UnderWay::new();
        self.start_parts(id, aim, class, is_single, pages, &mut under_way);
        self.count_parts(id, under_way.parts);
        self.end_submit(id)
    }

    /// So many parts of a request are under way, apart from those that were queued.
    #[inline(always)]
    fn count_parts(&mut self, id: RequestId, parts: u32) {
        if let Some(request) = self.requests.get(id) {
            request.left += parts;
        }
    }

    /// All writes of a request have been started and its parts counted. [`RequestId::DONE`] if all have ended
    /// without an error.
    pub(super) fn end_submit(&mut self, id: RequestId) -> RequestId {
        if let Some(request) = self.requests.get(id) {
            request.left -= 1;
        }
        let is_done = self.close_if_drained(id, false) && !self.requests.has_failed(id);
        if is_done { RequestId::DONE } else { id }
    }

    /// Enters one write of a scatter, which was admitted, and posts it as far as its link takes it; the rest
    /// waits in the peer's queue.
    fn start(
        &mut self,
        id: RequestId,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: &[Page],
        under_way: &mut UnderWay,
    ) {
        let ends = counters::get(&mut self.counters, counter);
        let Some(target) = Target::of(&mut self.peers, ends, peer, pages) else { return };
        let (link, is_inline, class) = (target.path.link, target.path.inline, target.class);
        let entry = target.enter(pages, round);
        let aim = Aim { peer, lane: entry.lane, credits: None };
        if let Some(trace) = &mut self.trace {
            record(trace, peer, entry.lane, entry.value, pages);
        }
        if is_inline {
            if let Err(why) = self.post_inline(link, aim, class, None, pages) {
                self.fail_request(id, peer, why);
            }
            return;
        }
        self.start_parts(id, aim, class, entry.is_single, pages, under_way);
    }

    /// Posts one peer's write of a request as far as its link takes it; the rest waits in the peer's
    /// queue.
    #[inline(always)]
    fn start_parts(
        &mut self,
        id: RequestId,
        aim: Aim,
        class: Class,
        is_single: bool,
        pages: &[Page],
        under_way: &mut UnderWay,
    ) {
        let Aim { peer, lane, credits } = aim;
        let Peer { path: Some(Path { link, .. }), queue, .. } = &self.peers[peer.index()] else {
            return;
        };
        let link = *link;
        self.unflushed |= 1 << link;
        if !is_single || queue.is_listed() {
            let waits = queue.is_waiting(class);
            if waits || !is_single {
                self.enqueue(id, aim, class, pages);
                if !waits {
                    self.post_queued(peer);
                }
                return;
            }
        }
        let token = Token::of(id, peer);
        let work = Work { token, peer, lane, credits, rider: None, class, pages };
        let posted = self.links[usize::from(link)].post(&work, &mut self.sink);
        let Ok(Posted::InFlight) = posted else {
            return self.note_posted(id, aim, class, pages, posted);
        };
        under_way.parts += 1;
        for page in pages {
            self.borrow_under_way(id, page.source, under_way);
        }
    }

    /// Enters and posts the writes of a scatter, which were admitted: runs over one link together, the others
    /// one by one. `writes` have the pages of those that are not of one page each; without them, each write is
    /// one page of the same source.
    #[inline(always)]
    pub(super) fn post_admitted(
        &mut self,
        id: RequestId,
        counter: CounterId,
        round_of: impl Fn(usize) -> u64,
        parts: &mut [ScatterPart],
        writes: &[PeerWrite<'_>],
    ) -> RequestId {
        let mut under_way = UnderWay::new();
        let mut place = 0;
        while place < parts.len() {
            let (link, class) = (parts[place].link, self.class_of(counter));
            let run =
                self.enter_run(counter, |behind| round_of(place + behind), &mut parts[place..]);
            if run > 0 {
                let run = &parts[place..place + run];
                let in_flight = self.post_batch(id, link, class, run, &mut under_way);
                let readers = if writes.is_empty() { in_flight.min(1) } else { in_flight };
                self.borrow_sources(id, &run[..readers], &mut under_way);
            } else {
                let ScatterPart { peer, page, .. } = parts[place];
                let page = [page];
                let pages = writes.get(place).map_or(&page[..], |write| write.pages);
                self.start(id, peer, counter, round_of(place), pages, &mut under_way);
            }
            place += run.max(1);
        }
        self.count_parts(id, under_way.parts);
        self.flush_all();
        if self.sink.held {
            self.hold_scatter(id, parts);
        }
        self.end_submit(id)
    }

    /// Enters the writes at the beginning that are of one part each and over one link. Returns their
    /// number: none if other writes wait for a link, or if writes are traced.
    #[inline(never)]
    fn enter_run(
        &mut self,
        counter: CounterId,
        round_of: impl Fn(usize) -> u64,
        parts: &mut [ScatterPart],
    ) -> usize {
        let Engine { counters, queued, unflushed, trace, .. } = self;
        let link = parts.first().map_or(ScatterPart::NO_LINK, |part| part.link);
        if link == ScatterPart::NO_LINK || !queued.is_empty() || trace.is_some() {
            return 0;
        }
        let Some(Counter { ends, .. }) = counters::get(counters, counter) else { return 0 };
        let ends = ends.as_mut_slice();
        *unflushed |= 1 << link;
        let mut run = 0;
        for part in parts {
            let Some(Some(End { remote: Some(remote), window, .. })) =
                ends.get_mut(part.peer.index())
            else {
                break;
            };
            if part.link != link {
                break;
            }
            part.lane = remote.enter(*window, round_of(run), 1, part.page.length);
            run += 1;
        }
        run
    }

    /// Posts parts of a request that have entered their rounds, over one link. Returns the number at the
    /// beginning of which some are under way.
    #[inline(always)]
    fn post_batch(
        &mut self,
        id: RequestId,
        link: u16,
        class: Class,
        parts: &[ScatterPart],
        under_way: &mut UnderWay,
    ) -> usize {
        let scatter = Scatter { token: Token::of(id, Rank(0)), class, parts };
        let posted = self.links[usize::from(link)].post_scatter(&scatter, &mut self.sink);
        under_way.parts += posted.in_flight;
        if posted.taken < parts.len() {
            self.post_rest(id, class, &parts[posted.taken..], posted.failed, under_way);
        }
        if posted.in_flight > 0 { posted.taken } else { 0 }
    }

    #[inline(never)]
    fn borrow_sources(&mut self, id: RequestId, parts: &[ScatterPart], under_way: &mut UnderWay) {
        for part in parts {
            self.borrow_under_way(id, part.page.source, under_way);
        }
    }

    /// Posts what a link has left of a batch, of which it did not take the first part.
    #[cold]
    #[inline(never)]
    fn post_rest(
        &mut self,
        id: RequestId,
        class: Class,
        parts: &[ScatterPart],
        failed: Option<String>,
        under_way: &mut UnderWay,
    ) {
        let aim = |part: &ScatterPart| Aim { peer: part.peer, lane: part.lane, credits: None };
        let Some((first, rest)) = parts.split_first() else { return };
        let refused = failed.map_or(Ok(Posted::Full), Err);
        self.note_posted(id, aim(first), class, &[first.page], refused);
        for part in rest {
            self.start_parts(id, aim(part), class, true, &[part.page], under_way);
        }
    }

    /// Borrows the source of a part under way, unless that is the source of the part before.
    #[inline(always)]
    fn borrow_under_way(&mut self, id: RequestId, source: RegionKey, under_way: &mut UnderWay) {
        if under_way.source != source {
            under_way.source = source;
            self.borrow_for(id, source);
        }
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
        if let Some(request) = self.requests.get(id) {
            request.reads(source);
        }
    }

    /// A credit, on the peer's return lane, to leave with the next flush.
    pub(super) fn owe_credit(&mut self, peer: Rank, lane: Lane, ours: Lane) {
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
                    if let Err(why) = self.post_inline(link, aim, class, None, &[]) {
                        self.write_failed(aim.peer, &why);
                    }
                } else {
                    self.unflushed |= 1 << link;
                    self.request(link, aim, class, None, &[], Tag::CREDIT);
                }
            }
        }
        self.owed.clear();
    }

    /// Sends what posts have held back: credits, and the links that have taken posts. Those of inline routes
    /// hold nothing back.
    #[inline(always)]
    pub(super) fn flush_all(&mut self) {
        if !self.owed.is_empty() {
            self.pay_credits();
        }
        while self.unflushed != 0 {
            let link = self.unflushed.trailing_zeros() as usize;
            self.unflushed &= self.unflushed - 1;
            self.flush_link(link);
        }
    }

    #[inline(always)]
    pub(super) fn flush_link(&mut self, link: usize) {
        self.links[link].flush(&mut self.sink);
        if !self.sink.is_empty() {
            self.take_flushed();
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn write_failed(&mut self, peer: Rank, why: &str) {
        self.peers[peer.index()].totals.errors += 1;
        let detail = format!("a write to {peer} failed: {why}");
        self.poison.poison(Poison { kind: Cause::Failed, rank: Some(peer), detail });
    }
}
