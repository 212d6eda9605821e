//! Queues of writes that found their link's queue full, one for each peer and traffic class.
//!
//! A full queue toward one peer delays no other peer. Within a peer and class, writes leave in the order
//! in which they were submitted, so no newer write overtakes an older one for ever.

use super::Engine;
use crate::error::Missing;
use crate::link::{Posted, Work};
use crate::parts::{PartRule, Parts};
use crate::request::{Aim, Token};
use crate::types::{Class, Page, RequestId};
use std::collections::VecDeque;
use weft_control::Rank;

/// What waits to be posted to one peer, by class.
#[derive(Default)]
pub(super) struct PeerQueue {
    latency: VecDeque<Waiting>,
    bulk: VecDeque<Waiting>,
    /// Listed in [`Engine`]'s `queued`.
    listed: bool,
}

/// The parts of one peer's write that no link has taken.
struct Waiting {
    request: RequestId,
    aim: Aim,
    parts: Parts,
    next: usize,
}

/// Page lists that are kept for the next write that has to wait.
const SPARE_PARTS: usize = 64;

impl PeerQueue {
    fn of(&mut self, class: Class) -> &mut VecDeque<Waiting> {
        match class {
            Class::Latency => &mut self.latency,
            Class::Bulk => &mut self.bulk,
        }
    }

    /// Whether a new write of this class has to wait behind others.
    pub fn is_waiting(&self, class: Class) -> bool {
        match class {
            Class::Latency => !self.latency.is_empty(),
            Class::Bulk => !self.bulk.is_empty(),
        }
    }

    /// Whether anything may be waiting.
    #[inline(always)]
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    fn is_empty(&self) -> bool {
        self.latency.is_empty() && self.bulk.is_empty()
    }
}

impl Engine {
    /// Puts one peer's write of a request behind those that wait.
    pub(super) fn enqueue(&mut self, request: RequestId, aim: Aim, class: Class, pages: &[Page]) {
        let mut parts = self.spare_parts.pop().unwrap_or_default();
        let route = self.peers[aim.peer.0 as usize].route;
        parts.cut(route.map_or(PartRule::WHOLE, |route| route.parts), pages);
        if let Some(request) = self.requests.get(request) {
            request.left += parts.len() as u32;
        }
        for page in pages {
            self.borrow_for(request, page.source);
        }
        let queue = &mut self.peers[aim.peer.0 as usize].queue;
        queue.of(class).push_back(Waiting { request, aim, parts, next: 0 });
        if !std::mem::replace(&mut queue.listed, true) {
            self.queued.push(aim.peer);
        }
    }

    /// Offers what waits, to each peer as far as its link takes it.
    pub(super) fn post_waiting(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        let mut queued = std::mem::take(&mut self.queued);
        queued.retain(|&peer| {
            self.post_queued(peer);
            let queue = &mut self.peers[peer.0 as usize].queue;
            queue.listed = !queue.is_empty();
            queue.listed
        });
        queued.append(&mut self.queued);
        self.queued = queued;
        self.flush_all();
    }

    /// Offers what waits for one peer, latency-critical parts first.
    pub(super) fn post_queued(&mut self, peer: Rank) {
        for class in [Class::Latency, Class::Bulk] {
            while self.post_front(peer, class) {}
        }
    }

    /// Offers the oldest write of a class; whether all of it was taken.
    fn post_front(&mut self, peer: Rank, class: Class) -> bool {
        let Engine { links, peers, sink, requests, unflushed, .. } = self;
        let state = &mut peers[peer.0 as usize];
        let Some(route) = state.route else { return false };
        let Some(waiting) = state.queue.of(class).front_mut() else { return false };
        // A credit was offered once before it came here.
        let (Aim { peer, lane, .. }, credits) = (waiting.aim, None);
        let token = Token::of(waiting.request, peer);
        let mut failure = None;
        while waiting.next < waiting.parts.len() {
            let pages = waiting.parts.part(waiting.next);
            let work = Work { token, peer, lane, credits, rider: None, class, pages };
            *unflushed |= 1 << route.index;
            match links[route.index].post(&work, sink) {
                Ok(Posted::Full) => return false,
                Ok(Posted::InFlight) => {}
                Ok(Posted::Done) => {
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

    /// Gives up the parts that no link has taken.
    fn abandon(&mut self, waiting: Waiting, why: String) {
        let rest = (waiting.parts.len() - waiting.next) as u32;
        if let Some(request) = self.requests.get(waiting.request) {
            request.left -= rest;
        }
        self.fail_request(waiting.request, waiting.aim.peer, why);
        self.close_waiting(waiting);
    }

    fn close_waiting(&mut self, waiting: Waiting) {
        if self.spare_parts.len() < SPARE_PARTS {
            self.spare_parts.push(waiting.parts);
        }
        self.close_if_drained(waiting.request, true);
    }

    /// The peers that a request waits for, as far as they are known: the one that it writes to, or those
    /// whose queues a scatter is in. A peer that has left is none of them, since its requests drain.
    #[cold]
    pub(crate) fn missing_of(&mut self, request: RequestId) -> Vec<Missing> {
        let known = self.requests.get(request).map(|known| (known.peer(), known.left));
        match known {
            Some((Some(rank), left)) if !self.poison.has_left(rank) => {
                vec![Missing { rank, expected: left.into(), seen: 0 }]
            }
            Some((None, _)) => self.missing_from_queues(|waiting| waiting.request == request),
            _ => Vec::new(),
        }
    }

    /// The peers for which writes wait.
    #[cold]
    pub(crate) fn missing_of_queues(&self) -> Vec<Missing> {
        self.missing_from_queues(|_| true)
    }

    fn missing_from_queues(&self, counts: impl Fn(&Waiting) -> bool) -> Vec<Missing> {
        let parts_toward = |rank: Rank| {
            let PeerQueue { latency, bulk, .. } = &self.peers[rank.index()].queue;
            let counted = latency.iter().chain(bulk).filter(|waiting| counts(waiting));
            counted.map(|waiting| (waiting.parts.len() - waiting.next) as u64).sum()
        };
        let here = self.queued.iter().filter(|rank| !self.poison.has_left(**rank));
        let missing = |&rank| Missing { rank, expected: parts_toward(rank), seen: 0 };
        here.map(missing).filter(|missing| missing.expected > 0).collect()
    }

    /// Whether a write waits for a queue.
    pub(crate) fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Drains with an error what waits for a peer.
    pub(super) fn abandon_queued(&mut self, peer: Rank, why: &str) {
        for class in [Class::Latency, Class::Bulk] {
            while let Some(waiting) = self.peers[peer.0 as usize].queue.of(class).pop_front() {
                self.abandon(waiting, why.to_owned());
            }
        }
    }
}
