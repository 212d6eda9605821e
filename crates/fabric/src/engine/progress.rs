//! Polling: arrivals, completions, losses.

use super::{Engine, Suspect};
use crate::driver::Event;
use crate::trace::ArrivalRecord;
use crate::types::{CounterId, LaneId, Time};
use weft_control::{Cause, Poison, Rank};

/// A lane that rose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Raised {
    /// Ours.
    pub counter: CounterId,
    /// The peer that raised it.
    pub peer: Rank,
    /// Raises in the oldest round without a credit to this peer.
    pub count: u64,
}

/// Place of the credit lane behind an end's first lane.
const CREDIT: u32 = 1;

impl Engine {
    /// Makes progress and appends what happened since the last poll to `events`. Never blocks.
    ///
    /// [`Event::Raised`] carries the whole count of the lane's round, so a driver may see one raise
    /// twice.
    pub fn poll(&mut self, now: Time, events: &mut Vec<Event>) {
        let before = events.len();
        self.polls += 1;
        self.flush_all();
        for link in &mut self.links {
            link.poll(now, &mut self.sink);
        }
        self.take_completions();
        if !self.queued.is_empty() {
            self.post_waiting();
        }
        if !self.sink.lost.is_empty() || !self.suspects.is_empty() {
            self.take_losses(now);
        }
        if !self.sink.raised.is_empty() || self.lanes.has_raised() {
            self.take_raises(now, events);
        }
        if !self.ended.is_empty() {
            for &tag in &self.ended {
                events.push(Event::Completed { tag });
            }
            self.ended.clear();
        }
        if self.poison.is_set() && !self.poison_reported {
            self.report_poison(events);
        }
        self.renew_timer();
        if events.len() > before {
            self.epoch += 1;
        }
    }

    #[cold]
    fn report_poison(&mut self, events: &mut Vec<Event>) {
        let Some(cause) = self.poison.get().cloned() else { return };
        self.poison_reported = true;
        self.fence_all();
        events.push(Event::Poisoned(cause));
    }

    /// Counts what may end a wait: polls that found something, ends of requests, rounds that open.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Counts all polls.
    pub(crate) fn polls(&self) -> u64 {
        self.polls
    }

    /// Makes the waits of other threads look again, as a poll that found something does.
    pub(crate) fn renew_waits(&mut self) {
        self.epoch += 1;
    }

    /// Keeps the completions among the events of a poll whose driver could not take them.
    pub(crate) fn keep_completions(&mut self, events: &[Event]) {
        for event in events {
            if let Event::Completed { tag } = event {
                self.held.push(*tag);
            }
        }
    }

    /// As [`Engine::poll`], for the driver of this namespace (0: none): completions that belong to
    /// other drivers are kept for them.
    pub(crate) fn poll_for(&mut self, namespace: u16, now: Time, events: &mut Vec<Event>) {
        self.poll(now, events);
        if events.is_empty() {
            return;
        }
        let mine = |tag: u64| tag >> Event::NAMESPACE_SHIFT == u64::from(namespace);
        let held = &mut self.held;
        events.retain(|event| match event {
            Event::Completed { tag } if !mine(*tag) => {
                if tag >> Event::NAMESPACE_SHIFT != 0 {
                    held.push(*tag);
                }
                false
            }
            _ => true,
        });
    }

    /// Polls for callers without a driver: completions that belong to drivers are kept for them, and
    /// [`Engine::raised`] returns the lanes that rose.
    pub fn progress(&mut self) {
        self.progress_at(crate::clock::now());
    }

    /// [`Engine::progress`] at this time. Returns whether something happened.
    pub(crate) fn progress_at(&mut self, now: Time) -> bool {
        let (mut events, epoch) = (std::mem::take(&mut self.events), self.epoch);
        events.clear();
        self.poll_for(0, now, &mut events);
        self.events = events;
        self.epoch != epoch
    }

    /// The lanes that rose since this was last asked, each once, with the raises in the oldest round
    /// without a credit. Lanes whose wait has succeeded meanwhile are left out, as are the counters of
    /// drivers and of barriers.
    pub fn raised(&mut self) -> Vec<Raised> {
        self.progress();
        self.news = false;
        let mut rose = std::mem::take(&mut self.rose);
        rose.sort_unstable();
        let mut raised = Vec::new();
        for &(counter, peer) in &rose {
            let Ok(end) = self.end(counter, peer) else { continue };
            end.listed = false;
            if self.is_internal(counter) {
                continue;
            }
            let count = self.count(counter, peer).unwrap_or_default();
            if count > 0 {
                raised.push(Raised { counter, peer, count });
            }
        }
        rose.clear();
        self.rose = rose;
        raised
    }

    /// A wait has returned what rose here: [`Engine::raised`] need not.
    pub(crate) fn unlist(&mut self, counter: CounterId, peer: Rank) {
        if !self.rose.is_empty()
            && let Ok(end) = self.end(counter, peer)
            && std::mem::take(&mut end.listed)
        {
            self.rose.retain(|entry| *entry != (counter, peer));
        }
    }

    /// The round that has become the oldest had risen before: [`Engine::raised`] reports it now.
    pub(super) fn list(&mut self, counter: CounterId, peer: Rank) {
        let had_news = self.has_news();
        if let Ok(end) = self.end(counter, peer) {
            end.listed = true;
            self.rose.push((counter, peer));
            self.ring_for_news(had_news);
        }
    }

    /// Whether [`Engine::raised`] would find something without a poll.
    pub(super) fn has_news(&self) -> bool {
        self.news || !self.rose.is_empty()
    }

    /// Something has happened that the event loop has to look for.
    pub(super) fn note_news(&mut self) {
        let had_news = self.has_news();
        self.news = true;
        self.ring_for_news(had_news);
    }

    fn ring_for_news(&mut self, had_news: bool) {
        if !had_news && self.has_news() {
            self.ring_event_loop();
        }
    }

    pub(super) fn is_internal(&self, counter: CounterId) -> bool {
        let known = self.counters.get(counter.index()).and_then(Option::as_ref);
        Some(counter) == self.barrier || known.is_some_and(|(_, known)| known.internal)
    }

    /// Where a driver's counters stand, and its completions that others came across: what it has
    /// missed while it was not polled.
    pub(crate) fn catch_up(
        &mut self,
        namespace: u16,
        counters: &[CounterId],
        events: &mut Vec<Event>,
    ) {
        for &counter in counters {
            if let Some(Some((_, known))) = self.counters.get_mut(counter.index())
                && !std::mem::replace(&mut known.internal, true)
            {
                self.rose.retain(|(listed, _)| *listed != counter);
            }
            for peer in self.peers() {
                let Ok(end) = self.end(counter, peer) else { continue };
                let (given, window) = (end.given, u64::from(end.window));
                for round in given..given + window {
                    let count = self.count_in(counter, peer, round).unwrap_or_default();
                    if count > 0 {
                        events.push(Event::Raised { counter, peer, round, count });
                    }
                }
                let credits = self.credits(counter, peer).unwrap_or_default();
                if credits > 0 {
                    events.push(Event::Credited { counter, peer, credits });
                }
            }
        }
        self.held.retain(|&tag| {
            let mine = tag >> Event::NAMESPACE_SHIFT == u64::from(namespace);
            if mine {
                events.push(Event::Completed { tag });
            }
            !mine
        });
    }

    /// Takes what links report outside of a poll, which may be the last look at it for long.
    #[cold]
    pub(super) fn take_flushed(&mut self) {
        self.take_completions();
        if !self.queued.is_empty() || !self.sink.lost.is_empty() {
            // There may be room for what is queued: a poll is due.
            self.epoch += 1;
            self.note_news();
        }
    }

    #[inline(always)]
    fn take_completions(&mut self) {
        self.epoch += self.sink.completed.len() as u64;
        while let Some(token) = self.sink.completed.pop() {
            self.part_done(token);
        }
        while let Some((token, why)) = self.sink.failures.pop() {
            self.epoch += 1;
            self.part_failed(token, why);
        }
    }

    /// A broken connection is not yet a death: the control plane may report next that the peer has left
    /// in peace. Without such a report within the grace period, it is.
    fn take_losses(&mut self, now: Time) {
        while let Some((rank, why)) = self.sink.lost.pop() {
            if !self.suspects.iter().any(|suspect| suspect.rank == rank) {
                self.suspects.push(Suspect { rank, since: now, why });
            }
        }
        let mut suspects = std::mem::take(&mut self.suspects);
        suspects.retain(|Suspect { rank, since, why }| {
            if self.poison.has_left(*rank) {
                self.fence(*rank, "the peer has left");
                return false;
            }
            if now.since(*since) < self.config.loss_grace {
                return true;
            }
            let detail = format!("{rank} is lost: {why}");
            self.poison.poison(Poison { kind: Cause::Lost, rank: Some(*rank), detail });
            false
        });
        self.suspects = suspects;
    }

    /// Takes the lanes that links have raised in this poll, and those that peers' stores and other threads have
    /// marked.
    #[inline(never)]
    fn take_raises(&mut self, now: Time, events: &mut Vec<Event>) {
        let had_news = self.has_news();
        let mut raised = std::mem::take(&mut self.sink.raised);
        if self.lanes.has_raised() {
            self.lanes.take_raised(|number| raised.extend(LaneId::new(number as u32)));
        }
        for lane in raised.drain(..) {
            self.lane_rose(lane, now, events);
        }
        self.sink.raised = raised;
        self.ring_for_news(had_news);
    }

    /// Reports a lane that rose.
    #[inline]
    fn lane_rose(&mut self, lane: LaneId, now: Time, events: &mut Vec<Event>) {
        let Engine { lanes, lane_uses, counters, peers, trace, rose, news, barrier, .. } = self;
        let Some(Some(usage)) = lane_uses.get(lane.get() as usize).copied() else { return };
        let super::LaneUse { counter, peer, offset } = usage;
        let Some(Some((_, known))) = counters.get_mut(counter.index()) else { return };
        let internal = known.internal || *barrier == Some(counter);
        let Some(end) = known.ends[peer.0 as usize].as_mut() else { return };
        peers[peer.0 as usize].totals.arrivals += 1;
        if offset == CREDIT {
            *news |= !internal;
            let credits = lanes.value(end.credit.id());
            events.push(Event::Credited { counter, peer, credits });
            return;
        }
        let round = end.round_of(offset);
        let value = lanes.value(end.data_of(round));
        if let Some(trace) = trace {
            let lane = lane.get();
            trace.arrival(ArrivalRecord { at: now, peer, lane, value });
        }
        let count = end.count_at(round, value);
        if count > 0 {
            events.push(Event::Raised { counter, peer, round, count });
            if !internal && !std::mem::replace(&mut end.listed, true) {
                rose.push((counter, peer));
            }
        }
    }

    /// Cuts one peer off; what was under way or waited for it drains with an error.
    fn fence(&mut self, rank: Rank, why: &str) {
        if let Some(route) = self.peers[rank.index()].route {
            self.links[route.index].fence(rank, &mut self.sink);
        }
        self.abandon_queued(rank, why);
        self.take_completions();
    }

    /// Cuts every peer off. Called once, when the group is found poisoned.
    fn fence_all(&mut self) {
        for rank in 0..self.peers.len() {
            self.fence(Rank(rank as u32), "the group is poisoned");
        }
    }
}
