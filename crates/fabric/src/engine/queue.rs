//! Write queues for full links, one for each peer and traffic class.
//!
//! A full queue toward one peer delays no other peer. Within a peer and class, writes leave in submission
//! order.

use super::peer_queue::{PeerQueue, QueuedWrite};
use super::state::Engine;
use crate::error::MissingPeer;
use crate::link::{PostStatus, WorkRequest};
use crate::parts::PartRule;
use crate::request::{LaneTarget, PartToken};
use crate::types::{Page, RequestId, TrafficClass};
use weft_control::Rank;

/// Page lists kept for reuse.
const SPARE_PARTS: usize = 64;

impl Engine {
    /// Appends a request's write to the peer's queue.
    pub(super) fn enqueue(
        &mut self,
        request: RequestId,
        destination: LaneTarget,
        class: TrafficClass,
        pages: &[Page],
    ) {
        let mut parts = self.spare_parts.pop().unwrap_or_default();
        let route = self.peers[destination.peer.index()].route;
        parts.cut(route.map_or(PartRule::WHOLE, |route| route.parts), pages);
        if let Some(request) = self.requests.get(request) {
            request.left += parts.len() as u32;
        }
        for page in pages {
            self.borrow_for(request, page.source);
        }
        let queue = &mut self.peers[destination.peer.index()].queue;
        queue.of(class).push_back(QueuedWrite { request, destination, parts, next: 0 });
        if !std::mem::replace(&mut queue.listed, true) {
            self.queued.push(destination.peer);
        }
    }

    /// Posts queued writes, to each peer as far as the link accepts.
    pub(super) fn post_waiting(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        let mut queued = std::mem::take(&mut self.queued);
        queued.retain(|&peer| {
            self.post_queued(peer);
            let queue = &mut self.peers[peer.index()].queue;
            queue.listed = !queue.is_empty();
            queue.listed
        });
        queued.append(&mut self.queued);
        self.queued = queued;
        self.flush_all();
    }

    /// Posts one peer's queued writes, latency-critical parts first.
    pub(super) fn post_queued(&mut self, peer: Rank) {
        for class in [TrafficClass::Latency, TrafficClass::Bulk] {
            while self.post_front(peer, class) {}
        }
    }

    /// Posts the oldest write in a class; returns true if all of it was accepted.
    fn post_front(&mut self, peer: Rank, class: TrafficClass) -> bool {
        let Engine { links, peers, sink, requests, unflushed, .. } = self;
        let state = &mut peers[peer.index()];
        let Some(route) = state.route else { return false };
        let Some(waiting) = state.queue.of(class).front_mut() else { return false };
        // A queued credit has been posted once before.
        let (LaneTarget { peer, lane, .. }, credits) = (waiting.destination, None);
        let token = PartToken::of(waiting.request, peer);
        let mut failure = None;
        while waiting.next < waiting.parts.len() {
            let pages = waiting.parts.part(waiting.next);
            let work = WorkRequest { token, peer, lane, credits, piggyback: None, class, pages };
            *unflushed |= 1 << route.index;
            match links[route.index].post(&work, sink) {
                Ok(PostStatus::Full) => return false,
                Ok(PostStatus::InFlight) => {}
                Ok(PostStatus::Done) => {
                    let held = links[route.index].hold(peer, token);
                    if let Some(request) = requests.get(waiting.request) {
                        request.left = request.left + held - 1;
                    }
                }
                Err(why) => {
                    failure = Some(why);
                    break;
                }
            }
            waiting.next += 1;
        }
        let Some(waiting) = state.queue.of(class).pop_front() else { return false };
        if let Some(why) = failure {
            self.abandon(waiting, why);
        } else {
            self.close_waiting(waiting);
        }
        true
    }

    /// Fails the parts that the link has not accepted.
    fn abandon(&mut self, waiting: QueuedWrite, why: String) {
        let rest = (waiting.parts.len() - waiting.next) as u32;
        if let Some(request) = self.requests.get(waiting.request) {
            request.left -= rest;
        }
        self.fail_request(waiting.request, waiting.destination.peer, why);
        self.close_waiting(waiting);
    }

    fn close_waiting(&mut self, waiting: QueuedWrite) {
        if self.spare_parts.len() < SPARE_PARTS {
            self.spare_parts.push(waiting.parts);
        }
        self.close_if_drained(waiting.request, true);
    }

    /// Peers that a request waits for: one peer, or all peers whose queues hold writes from a scatter.
    /// Peers that have left are omitted, since requests to them drain.
    #[cold]
    pub(crate) fn missing_of(&mut self, request: RequestId) -> Vec<MissingPeer> {
        let known = self.requests.get(request).map(|known| (known.peer(), known.left));
        match known {
            Some((Some(rank), left)) if !self.poison.has_left(rank) => {
                vec![MissingPeer { rank, expected: left.into(), seen: 0 }]
            }
            Some((None, _)) => self.missing_from_queues(|waiting| waiting.request == request),
            _ => Vec::new(),
        }
    }

    /// Peers with queued writes.
    #[cold]
    pub(crate) fn missing_of_queues(&self) -> Vec<MissingPeer> {
        self.missing_from_queues(|_| true)
    }

    fn missing_from_queues(&self, counts: impl Fn(&QueuedWrite) -> bool) -> Vec<MissingPeer> {
        let parts_toward = |rank: Rank| {
            let PeerQueue { latency, bulk, .. } = &self.peers[rank.index()].queue;
            let counted = latency.iter().chain(bulk).filter(|waiting| counts(waiting));
            counted.map(|waiting| (waiting.parts.len() - waiting.next) as u64).sum()
        };
        let here = self.queued.iter().filter(|rank| !self.poison.has_left(**rank));
        let missing = |&rank| MissingPeer { rank, expected: parts_toward(rank), seen: 0 };
        here.map(missing).filter(|missing| missing.expected > 0).collect()
    }

    /// True with queued writes.
    pub(crate) fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Fails a peer's queued writes.
    pub(super) fn abandon_queued(&mut self, peer: Rank, why: &str) {
        for class in [TrafficClass::Latency, TrafficClass::Bulk] {
            while let Some(waiting) = self.peers[peer.index()].queue.of(class).pop_front() {
                self.abandon(waiting, why.to_owned());
            }
        }
    }
}
