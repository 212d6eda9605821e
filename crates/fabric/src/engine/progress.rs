//! Polls: arrivals, completions, losses.

use super::state::{Engine, LaneUse, PendingLoss};
use crate::driver::Event;
use crate::trace::ArrivalRecord;
use crate::types::{CounterId, LaneId, Time};
use weft_control::{Cause, Poison, Rank};

/// Raised counter lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RaisedCounter {
    /// Our counter.
    pub counter: CounterId,
    /// The peer that raised it.
    pub peer: Rank,
    /// Raises in the oldest round without a credit to this peer.
    pub count: u64,
}

/// Offset from an end's first lane to the credit lane.
const CREDIT: u32 = 1;

impl Engine {
    /// Makes progress and appends the events since the last poll. Never blocks.
    ///
    /// [`Event::Raised`] carries the lane's total count in the round, so a driver may receive one raise
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
        if !self.sink.lost.is_empty() || !self.pending_losses.is_empty() {
            self.take_losses(now);
        }
        if !self.sink.raised.is_empty() || self.lanes.has_dirty() {
            self.take_raises(now, events);
        }
        if !self.completed_tags.is_empty() {
            for &tag in &self.completed_tags {
                events.push(Event::Completed { tag });
            }
            self.completed_tags.clear();
        }
        if events.len() > before {
            self.epoch += 1;
        }
        if self.has_watches() {
            self.check_watches();
            if self.poison.any_has_left() {
                self.check_departures(now);
            }
        }
        if self.poison.is_set() && !self.poison_reported {
            self.report_poison(events);
            self.epoch += 1;
        }
        self.renew_timer();
    }

    #[cold]
    fn report_poison(&mut self, events: &mut Vec<Event>) {
        let Some(cause) = self.poison.get().cloned() else { return };
        self.poison_reported = true;
        self.fence_all();
        events.push(Event::Poisoned(cause));
        if self.has_watches() {
            self.fail_watches();
        }
    }

    /// Ends all connections if the group is poisoned. The next poll reports the poison.
    pub(crate) fn fence_if_poisoned(&mut self) {
        if self.poison.is_set() {
            self.fence_all();
        }
    }

    /// Count of events that may end a wait: polls with events, completions, opened rounds.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Polls so far.
    pub(crate) fn polls(&self) -> u64 {
        self.polls
    }

    /// Wakes waits in other threads, as a poll with events does.
    pub(crate) fn renew_waits(&mut self) {
        self.epoch += 1;
    }

    /// Keeps a poll's completions for a driver that could not be polled.
    pub(crate) fn keep_completions(&mut self, events: &[Event]) {
        for event in events {
            if let Event::Completed { tag } = event {
                self.foreign_tags.push(*tag);
            }
        }
    }

    /// Same as [`Engine::poll`], for the driver in this namespace (0: none): completions that belong to
    /// other drivers are kept for them.
    pub(crate) fn poll_for(&mut self, namespace: u16, now: Time, events: &mut Vec<Event>) {
        self.poll(now, events);
        if events.is_empty() {
            return;
        }
        let mine = |tag: u64| tag >> Event::NAMESPACE_SHIFT == u64::from(namespace);
        let held = &mut self.foreign_tags;
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

    /// Polls for callers without a driver: driver completions are kept, and [`Engine::raised`] returns
    /// the raised lanes.
    pub fn progress(&mut self) {
        self.progress_at(crate::clock::now());
    }

    /// [`Engine::progress`] at this time. Returns true after an event.
    pub(crate) fn progress_at(&mut self, now: Time) -> bool {
        let (mut events, epoch) = (std::mem::take(&mut self.events), self.epoch);
        events.clear();
        self.poll_for(0, now, &mut events);
        self.events = events;
        self.epoch != epoch
    }

    /// Counters raised since the last call, each once, with the raises in the oldest round without a
    /// credit. Leaves out lanes whose wait has returned since, and counters used by drivers and barriers.
    pub fn raised(&mut self) -> Vec<RaisedCounter> {
        self.progress();
        self.unreported = false;
        let mut raised_lanes = std::mem::take(&mut self.raised_lanes);
        raised_lanes.sort_unstable();
        let mut raised = Vec::new();
        for &(counter, peer) in &raised_lanes {
            let Ok(end) = self.end(counter, peer) else { continue };
            end.listed = false;
            if self.is_internal(counter) {
                continue;
            }
            let count = self.count(counter, peer).unwrap_or_default();
            if count > 0 {
                raised.push(RaisedCounter { counter, peer, count });
            }
        }
        raised_lanes.clear();
        self.raised_lanes = raised_lanes;
        raised
    }

    /// Removes an [`Engine::raised`] entry after a wait has returned it.
    pub(crate) fn unlist(&mut self, counter: CounterId, peer: Rank) {
        if !self.raised_lanes.is_empty()
            && let Ok(end) = self.end(counter, peer)
            && std::mem::take(&mut end.listed)
        {
            self.raised_lanes.retain(|entry| *entry != (counter, peer));
        }
    }

    /// Adds an entry to [`Engine::raised`] for a round raised before it became the oldest.
    pub(super) fn list(&mut self, counter: CounterId, peer: Rank) {
        let had_unreported = self.has_unreported();
        if let Ok(end) = self.end(counter, peer) {
            end.listed = true;
            self.raised_lanes.push((counter, peer));
            self.ring_if_unreported(had_unreported);
        }
    }

    /// True if [`Engine::raised`] has entries without a poll.
    pub(super) fn has_unreported(&self) -> bool {
        self.unreported || !self.raised_lanes.is_empty()
    }

    /// Records an event for the program's event loop.
    pub(super) fn note_unreported(&mut self) {
        let had_unreported = self.has_unreported();
        self.unreported = true;
        self.ring_if_unreported(had_unreported);
    }

    fn ring_if_unreported(&mut self, had_unreported: bool) {
        if !had_unreported && self.has_unreported() {
            self.ring_event_loop();
        }
    }

    pub(super) fn is_internal(&self, counter: CounterId) -> bool {
        let known = self.counters.get(counter.index()).and_then(Option::as_ref);
        Some(counter) == self.barrier || known.is_some_and(|(_, known)| known.internal)
    }

    /// Events that a driver missed between two polls: counter state, and the completions kept for it.
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
                self.raised_lanes.retain(|(listed, _)| *listed != counter);
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
        self.foreign_tags.retain(|&tag| {
            let mine = tag >> Event::NAMESPACE_SHIFT == u64::from(namespace);
            if mine {
                events.push(Event::Completed { tag });
            }
            !mine
        });
    }

    /// Takes link reports outside a poll, since the next poll may be far off.
    #[cold]
    pub(super) fn take_flushed(&mut self) {
        self.take_completions();
        if !self.queued.is_empty() || !self.sink.lost.is_empty() {
            // The links may accept queued parts now: a poll is due.
            self.epoch += 1;
            self.note_unreported();
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

    /// A broken connection counts as a loss after the grace period, within which the control plane may
    /// report that the peer has left.
    fn take_losses(&mut self, now: Time) {
        while let Some((rank, why)) = self.sink.lost.pop() {
            if !self.pending_losses.iter().any(|loss| loss.rank == rank) {
                self.pending_losses.push(PendingLoss { rank, since: now, why });
            }
        }
        let mut pending_losses = std::mem::take(&mut self.pending_losses);
        pending_losses.retain(|PendingLoss { rank, since, why }| {
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
        self.pending_losses = pending_losses;
    }

    /// Takes the lanes that links have raised in this poll, and those with dirty bits from peers' stores
    /// and other threads.
    #[inline(never)]
    fn take_raises(&mut self, now: Time, events: &mut Vec<Event>) {
        let had_unreported = self.has_unreported();
        let mut raised = std::mem::take(&mut self.sink.raised);
        if self.lanes.has_dirty() {
            // A message is not an engine event: the waits look for it.
            self.epoch += u64::from(self.lanes.take_message());
            self.lanes.take_dirty(|number| {
                if let Some(lane) = LaneId::new(number as u32) {
                    self.lanes.prefetch(lane);
                    raised.push(lane);
                }
            });
        }
        for lane in raised.drain(..) {
            self.lane_rose(lane, now, events);
        }
        self.sink.raised = raised;
        self.ring_if_unreported(had_unreported);
    }

    /// Reports a raised lane.
    #[inline]
    fn lane_rose(&mut self, lane: LaneId, now: Time, events: &mut Vec<Event>) {
        let Engine {
            lanes,
            lane_uses,
            counters,
            peers,
            trace,
            raised_lanes,
            unreported,
            barrier,
            ..
        } = self;
        let Some(Some(usage)) = lane_uses.get(lane.get() as usize).copied() else { return };
        let LaneUse { counter, peer, offset } = usage;
        let Some(Some((_, known))) = counters.get_mut(counter.index()) else { return };
        let internal = known.internal || *barrier == Some(counter);
        let Some(end) = known.ends[peer.index()].as_mut() else { return };
        peers[peer.index()].totals.arrivals += 1;
        if offset == CREDIT {
            *unreported |= !internal;
            let credits = lanes.value(end.credit.id());
            events.push(Event::Credited { counter, peer, credits });
            return;
        }
        let round = end.round_of(offset);
        let value = lanes.value(lane);
        if let Some(trace) = trace {
            let lane = lane.get();
            trace.arrival(ArrivalRecord { at: now, peer, lane, value });
        }
        let count = end.count_in_lane(offset, value);
        if count > 0 {
            events.push(Event::Raised { counter, peer, round, count });
            if !internal && !std::mem::replace(&mut end.listed, true) {
                raised_lanes.push((counter, peer));
            }
        }
    }

    /// Ends the connection to one peer; parts in flight and queued drain with an error.
    fn fence(&mut self, rank: Rank, why: &str) {
        if let Some(route) = self.peers[rank.index()].route {
            self.links[route.index].fence(rank, &mut self.sink);
        }
        self.abandon_queued(rank, why);
        self.take_completions();
    }

    /// Ends all connections after the group is poisoned.
    fn fence_all(&mut self) {
        for rank in 0..self.peers.len() {
            self.fence(Rank(rank as u32), "the group is poisoned");
        }
    }
}
