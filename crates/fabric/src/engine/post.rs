//! Posts parts to links. `queue.rs` keeps parts that found a full queue.
//!
//! A part that completes inside the post (shm) needs no request; parts in flight after submit belong to a
//! [`crate::request::Request`].

use super::counters::{self, Counter, CounterEnd};
use super::route::{EnginePeer, PostPath};
use super::state::Engine;
use super::submit::{PeerWrite, record};
use super::target::WriteTarget;
use crate::link::{PostStatus, Scatter, ScatterPart, WorkRequest};
use crate::request::{LaneTarget, PartToken, RequestTag};
use crate::types::{CounterId, Lane, Page, RegionKey, RequestId, TrafficClass};
use weft_control::{Cause, Poison, Rank};

/// A request's parts in flight, counted during submit.
struct InFlightParts {
    parts: u32,
    /// Source region of the last part.
    source: RegionKey,
}

impl InFlightParts {
    fn new() -> InFlightParts {
        // No region has this key.
        InFlightParts { parts: 0, source: RegionKey(u32::MAX) }
    }
}

impl Engine {
    /// Posts a write over an inline route, which needs no request. The caller poisons the group on an
    /// error. Without `FLUSH`, the peer may be notified at the next flush.
    #[inline(always)]
    pub(super) fn post_inline<const FLUSH: bool>(
        &mut self,
        link: u16,
        LaneTarget { peer, lane, credits }: LaneTarget,
        class: TrafficClass,
        piggyback: Option<Lane>,
        pages: &[Page],
    ) -> Result<(), String> {
        let work = WorkRequest { token: 0, peer, lane, credits, piggyback, class, pages };
        let path = &mut self.links[usize::from(link)];
        let posted = if FLUSH {
            path.post(&work, &mut self.sink)
        } else {
            self.unflushed |= 1 << link;
            path.post_in_batch(&work, &mut self.sink)
        };
        debug_assert!(!matches!(posted, Ok(PostStatus::InFlight | PostStatus::Full)));
        posted.map(|_| ())
    }

    /// Posts a one-part write toward a peer without queued writes; the caller flushes the link. A part
    /// that completes at once leaves no request. A piggybacked credit that was not posted becomes pending
    /// again.
    #[inline(always)]
    pub(super) fn request(
        &mut self,
        link: u16,
        destination: LaneTarget,
        class: TrafficClass,
        piggyback: Option<LaneTarget>,
        pages: &[Page],
        tag: RequestTag,
    ) -> RequestId {
        let LaneTarget { peer, lane, credits } = destination;
        let Engine { requests, links, sink, .. } = self;
        let slot = requests.free_slot();
        let token = PartToken::of(slot.id, peer);
        let riding = piggyback.map(|credit| credit.lane);
        let work = WorkRequest { token, peer, lane, credits, piggyback: riding, class, pages };
        match links[usize::from(link)].post(&work, sink) {
            Ok(PostStatus::InFlight) => {
                let id = slot.id;
                let Some((first, rest)) = pages.split_first() else {
                    slot.open(tag, peer, None);
                    return id;
                };
                let request = slot.open(tag, peer, Some(first.source));
                for page in rest {
                    request.reads(page.source);
                }
                id
            }
            Ok(PostStatus::Done) => RequestId::DONE,
            refused => {
                self.pending_credits.extend(piggyback);
                self.request_refused(destination, class, pages, tag, refused)
            }
        }
    }

    /// Makes a request whose only part the link did not accept.
    #[cold]
    #[inline(never)]
    fn request_refused(
        &mut self,
        destination: LaneTarget,
        class: TrafficClass,
        pages: &[Page],
        tag: RequestTag,
        refused: Result<PostStatus, String>,
    ) -> RequestId {
        let (id, _) = self.requests.open(tag, destination.peer);
        self.note_posted(id, destination, class, pages, refused);
        self.end_submit(id)
    }

    /// Makes a request with several parts, or one behind queued writes.
    #[inline(never)]
    pub(super) fn request_parts(
        &mut self,
        destination: LaneTarget,
        class: TrafficClass,
        is_single: bool,
        pages: &[Page],
        tag: RequestTag,
    ) -> RequestId {
        let (id, _) = self.requests.open(tag, destination.peer);
        let mut in_flight = InFlightParts::new();
        self.start_parts(id, destination, class, is_single, pages, &mut in_flight);
        self.count_parts(id, in_flight.parts);
        self.end_submit(id)
    }

    /// Adds parts in flight to a request; queued parts are counted separately.
    #[inline(always)]
    fn count_parts(&mut self, id: RequestId, parts: u32) {
        if let Some(request) = self.requests.get(id) {
            request.left += parts;
        }
    }

    /// Ends the submit for a request whose parts are counted. [`RequestId::DONE`] if all have completed
    /// without an error.
    pub(super) fn end_submit(&mut self, id: RequestId) -> RequestId {
        if let Some(request) = self.requests.get(id) {
            request.left -= 1;
        }
        let is_done = self.close_if_drained(id, false) && !self.requests.has_failed(id);
        if is_done { RequestId::DONE } else { id }
    }

    /// Enters one validated scatter write into its round, and posts it as far as the link
    /// accepts; the rest waits in the peer's queue.
    fn start(
        &mut self,
        id: RequestId,
        peer: Rank,
        counter: CounterId,
        round: u64,
        pages: &[Page],
        in_flight: &mut InFlightParts,
    ) {
        let ends = counters::get(&mut self.counters, counter);
        let Some(target) = WriteTarget::of(&mut self.peers, ends, peer, pages) else { return };
        let (link, is_inline, class) = (target.path.link, target.path.inline, target.class);
        let entry = target.enter(pages, round);
        let destination = LaneTarget { peer, lane: entry.lane, credits: None };
        if let Some(trace) = &mut self.trace {
            record(trace, peer, entry.lane, entry.value, pages);
        }
        if is_inline {
            if let Err(why) = self.post_inline::<true>(link, destination, class, None, pages) {
                self.fail_request(id, peer, why);
            }
            return;
        }
        self.start_parts(id, destination, class, entry.is_single, pages, in_flight);
    }

    /// Posts a request's write to one peer as far as the link accepts; the rest waits in the peer's
    /// queue.
    #[inline(always)]
    fn start_parts(
        &mut self,
        id: RequestId,
        destination: LaneTarget,
        class: TrafficClass,
        is_single: bool,
        pages: &[Page],
        in_flight: &mut InFlightParts,
    ) {
        let LaneTarget { peer, lane, credits } = destination;
        let EnginePeer { path: Some(PostPath { link, .. }), queue, .. } = &self.peers[peer.index()]
        else {
            return;
        };
        let link = *link;
        self.unflushed |= 1 << link;
        if !is_single || queue.is_listed() {
            let waits = queue.is_waiting(class);
            if waits || !is_single {
                self.enqueue(id, destination, class, pages);
                if !waits {
                    self.post_queued(peer);
                }
                return;
            }
        }
        let token = PartToken::of(id, peer);
        let work = WorkRequest { token, peer, lane, credits, piggyback: None, class, pages };
        let posted = self.links[usize::from(link)].post(&work, &mut self.sink);
        let Ok(PostStatus::InFlight) = posted else {
            return self.note_posted(id, destination, class, pages, posted);
        };
        in_flight.parts += 1;
        for page in pages {
            self.borrow_in_flight(id, page.source, in_flight);
        }
    }

    /// Enters and posts a scatter's validated writes: runs over one link as a batch, others one by one.
    /// `writes` holds the pages for writes with several pages; if empty, each write is one page from the
    /// same source.
    #[inline(always)]
    pub(super) fn post_admitted(
        &mut self,
        id: RequestId,
        counter: CounterId,
        round_of: impl Fn(usize) -> u64,
        parts: &mut [ScatterPart],
        writes: &[PeerWrite<'_>],
    ) -> RequestId {
        self.post_scatter(id, counter, round_of, parts, writes);
        self.flush_all();
        if self.sink.held {
            self.sink.held = false;
            self.hold_scatter(id, parts);
        }
        self.end_submit(id)
    }

    /// Posts as [`Engine::post_admitted`] does, without a flush; the submit has not ended.
    #[inline(always)]
    pub(super) fn post_scatter(
        &mut self,
        id: RequestId,
        counter: CounterId,
        round_of: impl Fn(usize) -> u64,
        parts: &mut [ScatterPart],
        writes: &[PeerWrite<'_>],
    ) {
        let mut in_flight = InFlightParts::new();
        let mut index = 0;
        while index < parts.len() {
            let (link, class) = (parts[index].link, self.class_of(counter));
            let run =
                self.enter_run(counter, |behind| round_of(index + behind), &mut parts[index..]);
            if run > 0 {
                let run = &parts[index..index + run];
                let posted = self.post_batch(id, link, class, run, &mut in_flight);
                let readers = if writes.is_empty() { posted.min(1) } else { posted };
                self.borrow_sources(id, &run[..readers], &mut in_flight);
            } else {
                let ScatterPart { peer, page, .. } = parts[index];
                let page = [page];
                let pages = writes.get(index).map_or(&page[..], |write| write.pages);
                self.start(id, peer, counter, round_of(index), pages, &mut in_flight);
            }
            index += run.max(1);
        }
        self.count_parts(id, in_flight.parts);
    }

    /// Enters the leading one-part writes that use one link. Returns how many: zero with queued writes or
    /// a trace.
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
            let Some(Some(CounterEnd { remote: Some(remote), window, .. })) =
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

    /// Posts a batch of a request's parts over one link. Returns how many leading parts were accepted if
    /// some are in flight, else zero.
    #[inline(always)]
    fn post_batch(
        &mut self,
        id: RequestId,
        link: u16,
        class: TrafficClass,
        parts: &[ScatterPart],
        in_flight: &mut InFlightParts,
    ) -> usize {
        let scatter = Scatter { token: PartToken::of(id, Rank(0)), class, parts };
        let posted = self.links[usize::from(link)].post_scatter(&scatter, &mut self.sink);
        in_flight.parts += posted.in_flight;
        if posted.taken < parts.len() {
            self.post_rest(id, class, &parts[posted.taken..], posted.failed, in_flight);
        }
        if posted.in_flight > 0 { posted.taken } else { 0 }
    }

    #[inline(never)]
    fn borrow_sources(
        &mut self,
        id: RequestId,
        parts: &[ScatterPart],
        in_flight: &mut InFlightParts,
    ) {
        for part in parts {
            self.borrow_in_flight(id, part.page.source, in_flight);
        }
    }

    /// Posts the rest of a batch after the link did not accept the first part.
    #[cold]
    #[inline(never)]
    fn post_rest(
        &mut self,
        id: RequestId,
        class: TrafficClass,
        parts: &[ScatterPart],
        failed: Option<String>,
        in_flight: &mut InFlightParts,
    ) {
        let destination =
            |part: &ScatterPart| LaneTarget { peer: part.peer, lane: part.lane, credits: None };
        let Some((first, rest)) = parts.split_first() else { return };
        let refused = failed.map_or(Ok(PostStatus::Full), Err);
        self.note_posted(id, destination(first), class, &[first.page], refused);
        for part in rest {
            self.start_parts(id, destination(part), class, true, &[part.page], in_flight);
        }
    }

    /// Borrows the source for a part in flight, unless the previous part has the same source.
    #[inline(always)]
    fn borrow_in_flight(
        &mut self,
        id: RequestId,
        source: RegionKey,
        in_flight: &mut InFlightParts,
    ) {
        if in_flight.source != source {
            in_flight.source = source;
            self.borrow_for(id, source);
        }
    }

    /// Records the outcome for a part that is not in flight.
    #[inline(never)]
    fn note_posted(
        &mut self,
        id: RequestId,
        destination: LaneTarget,
        class: TrafficClass,
        pages: &[Page],
        posted: Result<PostStatus, String>,
    ) {
        match posted {
            Ok(PostStatus::Done | PostStatus::InFlight) => {}
            Ok(PostStatus::Full) => self.enqueue(id, destination, class, pages),
            Err(why) => self.fail_request(id, destination.peer, why),
        }
    }

    /// Keeps a source registered until the request is closed.
    pub(super) fn borrow_for(&mut self, id: RequestId, source: RegionKey) {
        if let Some(request) = self.requests.get(id) {
            request.reads(source);
        }
    }

    /// Adds a credit on the peer's credit lane, to leave with the next flush.
    pub(super) fn queue_credit(&mut self, peer: Rank, lane: Lane, ours: Lane) {
        self.pending_credits.push(LaneTarget { peer, lane, credits: Some(ours) });
    }

    /// Posts the pending credits.
    fn post_credits(&mut self) {
        if self.poison.get().is_none() {
            let mut next = 0;
            while let Some(&destination) = self.pending_credits.get(next) {
                next += 1;
                let Some(EnginePeer { path: Some(path), .. }) =
                    self.peers.get(destination.peer.index())
                else {
                    continue;
                };
                // Ahead of queued writes: a credit carries no bytes, and the peer waits for it.
                let (link, class) = (path.link, TrafficClass::Latency);
                if path.inline {
                    if let Err(why) = self.post_inline::<true>(link, destination, class, None, &[])
                    {
                        self.write_failed(destination.peer, &why);
                    }
                } else {
                    self.unflushed |= 1 << link;
                    self.request(link, destination, class, None, &[], RequestTag::CREDIT);
                }
            }
        }
        self.pending_credits.clear();
    }

    /// Posts pending credits and flushes the links with posts. Inline routes need one after a batch only.
    #[inline(always)]
    pub(super) fn flush_all(&mut self) {
        if !self.pending_credits.is_empty() {
            self.post_credits();
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
