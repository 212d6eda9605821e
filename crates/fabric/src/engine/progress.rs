//! Polling: what arrived, what ended, who is lost.

use super::Engine;
use crate::driver::Event;
use crate::request::Failure;
use crate::trace::ArrivalRecord;
use crate::types::{CounterId, RequestId, Time};
use weft_control::{Cause, Poison, Rank};

/// A lane that rose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Raised {
    /// Ours.
    pub counter: CounterId,
    /// Who raised it.
    pub peer: Rank,
    /// Raises since the last credit to this peer.
    pub count: u64,
}

impl Engine {
    /// Makes progress and appends what happened since the last poll to `events`. Never blocks.
    ///
    /// [`Event::Raised`] carries the whole count of the lane's round, so a driver that was told
    /// twice of one raise is none the worse.
    pub fn poll(&mut self, now: Time, events: &mut Vec<Event>) {
        if !self.owed.is_empty() {
            self.flush_all();
        }
        for provider in &mut self.providers {
            provider.poll(now, &mut self.sink);
        }
        self.take_completions();
        self.post_waiting();
        self.take_losses(now);
        self.take_raises(now, events);
        events.extend(self.ended.drain(..).map(|tag| Event::Completed { tag }));
        if !self.poison_reported
            && let Some(cause) = self.poison.get()
        {
            let cause = cause.clone();
            self.poison_reported = true;
            self.fence_all();
            events.push(Event::Poisoned(cause));
        }
    }

    /// As [`Engine::poll`], for the driver of this namespace (0: none): completions that belong to
    /// other drivers are kept for them.
    pub(crate) fn poll_for(&mut self, namespace: u16, now: Time, events: &mut Vec<Event>) {
        self.poll(now, events);
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

    /// Polls for whoever uses the engine without a driver: completions that belong to drivers are
    /// kept for them, and what rose can be asked with [`Engine::raised`].
    pub fn progress(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        self.poll_for(0, crate::clock::now(), &mut events);
        self.rose.extend(events.iter().filter_map(|event| match event {
            Event::Raised { counter, peer, .. } => Some((*counter, *peer)),
            _ => None,
        }));
        let rise = |event: &Event| matches!(event, Event::Raised { .. } | Event::Credited { .. });
        self.news |= events.iter().any(rise);
        self.events = events;
    }

    /// The lanes that rose since this was last asked, each once, with the raises since the last credit.
    /// What a wait or a driver has seen meanwhile is not among them, and neither is the barriers' counter.
    pub fn raised(&mut self) -> Vec<Raised> {
        self.progress();
        self.news = false;
        let mut rose = std::mem::take(&mut self.rose);
        rose.sort_unstable();
        rose.dedup();
        rose.retain(|(counter, _)| Some(*counter) != self.barrier);
        let count = |(counter, peer): (CounterId, Rank)| {
            let count = self.count(counter, peer).unwrap_or_default();
            (count > 0).then_some(Raised { counter, peer, count })
        };
        rose.into_iter().filter_map(count).collect()
    }

    /// Where a driver's counters stand, and its completions that others came across: what it must
    /// know after a time in which it was not polled.
    pub(crate) fn catch_up(
        &mut self,
        namespace: u16,
        counters: &[CounterId],
        events: &mut Vec<Event>,
    ) {
        for &counter in counters {
            for peer in self.peers() {
                let count = self.count(counter, peer).unwrap_or_default();
                if count > 0 {
                    events.push(Event::Raised { counter, peer, count });
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

    fn take_completions(&mut self) {
        while let Some(completion) = self.sink.completions.pop() {
            if let Some(id) = self.requests.ended(completion.token, completion.result) {
                self.close_if_drained(id, true);
            } else {
                log::warn!("a provider completed a part that was not under way");
            }
        }
    }

    /// Offers parts that found a full queue again.
    fn post_waiting(&mut self) {
        if self.posting.is_empty() {
            return;
        }
        let mut waiting = std::mem::take(&mut self.posting);
        waiting.retain(|&id| {
            let taken = self.post(id, None);
            if taken {
                self.close_if_drained(id, true);
            }
            !taken
        });
        waiting.append(&mut self.posting);
        self.posting = waiting;
        self.flush_all();
    }

    /// A broken connection is not yet a death: the control plane may be about to say that the peer
    /// has left in peace. If it says nothing for a while, it is.
    fn take_losses(&mut self, now: Time) {
        while let Some((rank, why)) = self.sink.lost.pop() {
            if let Some(peer) = self.peers.get_mut(rank.0 as usize) {
                peer.suspect.get_or_insert((now, why));
            }
        }
        for (number, peer) in self.peers.iter().enumerate() {
            let rank = Rank(number as u32);
            if let Some((since, why)) = &peer.suspect
                && now.since(*since) >= self.config.loss_grace
                && !self.poison.has_left(rank)
            {
                let detail = format!("{rank} is lost: {why}");
                self.poison.poison(Poison { kind: Cause::Lost, rank: Some(rank), detail });
            }
        }
    }

    fn take_raises(&mut self, now: Time, events: &mut Vec<Event>) {
        let Engine { lanes, pending, lane_uses, counters, peers, trace, .. } = self;
        lanes.take_raised(pending, |number| {
            let Some(usage) = lane_uses.get(number).copied() else { return };
            let end = counters[usage.counter.0 as usize].ends[usage.peer.0 as usize].as_ref();
            let Some(end) = end else { return };
            let lane = if usage.credit { end.credit.id() } else { end.data.id() };
            let value = lanes.value(lane);
            peers[usage.peer.0 as usize].totals.arrivals += 1;
            if usage.credit {
                let (counter, peer) = (usage.counter, usage.peer);
                events.push(Event::Credited { counter, peer, credits: value });
                return;
            }
            if let Some(trace) = trace {
                let (peer, lane) = (usage.peer, lane.get());
                trace.arrival(ArrivalRecord { at: now, peer, lane, value });
            }
            let count = value - end.base;
            if count > 0 {
                events.push(Event::Raised { counter: usage.counter, peer: usage.peer, count });
            }
        });
    }

    /// Cuts every peer off and drains every request with an error. Called once, when the group is
    /// found poisoned.
    fn fence_all(&mut self) {
        for rank in 0..self.peers.len() {
            if let Some(route) = self.peers[rank].route {
                self.providers[route.index].fence(Rank(rank as u32), &mut self.sink);
            }
        }
        self.take_completions();
        let waiting: Vec<RequestId> = std::mem::take(&mut self.posting);
        for id in waiting {
            if let Some(request) = self.requests.get(id) {
                let why = "the group is poisoned".into();
                request.abandon(Failure { why, target: None });
            }
            self.close_if_drained(id, true);
        }
    }
}
