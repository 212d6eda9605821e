//! A part from post to completion.
//!
//! ```text
//! post -- reorder delay --> depart -- network model --> arrive: bytes land, the lane rises
//!   \__________ the source is read at one of these three moments __________/
//!                               \__ the completion follows the read, before the arrival or after
//! ```
//!
//! A part on a broken link fails. A part toward a dead or fenced rank is discarded without a completion:
//! the sender receives the peer's loss and fences it, which drains the part.

use super::part_record::{Part, ReadAt};
use super::state::{SimEvent, State};
use super::violations::ViolationKind;
use crate::link::{PostStatus, WorkRequest};
use crate::network_model::FlowId;
use crate::random::mix;
use crate::types::{Lane, RegionKey};
use std::ops::Range;
use std::time::Duration;
use weft_control::Rank;

const FULL_RETRY: Duration = Duration::from_micros(1);

impl State {
    pub fn post(&mut self, from: Rank, work: &WorkRequest<'_>) -> Result<PostStatus, String> {
        let to = work.peer;
        let cut_off = self.link(from).fenced.contains(&to);
        if cut_off || self.link(from).dead {
            return Err(format!("{to} is fenced"));
        }
        if let Some(lane) = work.credits {
            // Taken at the first offer, even if the queue is full: from here on the owner may use the
            // bytes.
            self.credit(from, to, lane);
        }
        let bytes: u64 = work.pages.iter().map(|page| page.length).sum();
        let (parts, queued) = self.link(from).queued.get(&to).copied().unwrap_or_default();
        let full = parts >= self.queue_parts
            || (parts > 0 && queued.saturating_add(bytes) > self.queue_bytes);
        if full {
            return Ok(PostStatus::Full);
        }
        if self.random.chance(self.faults.full) {
            self.schedule_in(FULL_RETRY, SimEvent::Wake);
            return Ok(PostStatus::Full);
        }
        self.posted += 1;
        let id = self.posted;
        self.log_event(3, [u64::from(from.0), u64::from(to.0), id]);
        let mut part = Part {
            from,
            to,
            token: work.token,
            lane: work.lane,
            pages: work.pages.iter().filter(|page| page.length > 0).copied().collect(),
            read_at: ReadAt::Post,
            data: None,
            digest: 0,
            will_fail: self.random.chance(self.faults.fail) || self.faults.failing_part == Some(id),
            completes_early: false,
            ended: false,
            outcome: None,
            completed: false,
        };
        self.claim(id, &mut part);
        if self.random.chance(self.faults.late_source) {
            let at_arrival = self.random.chance(0.5);
            part.read_at = if at_arrival { ReadAt::Arrival } else { ReadAt::Departure };
        }
        part.completes_early =
            part.read_at != ReadAt::Arrival && self.random.chance(self.faults.early_completion);
        if let Some(data) = self.read(&part) {
            part.digest = digest(0, &data);
            part.data = (part.read_at == ReadAt::Post).then_some(data);
        }
        let queued = self.link_mut(from).queued.entry(to).or_default();
        *queued = (queued.0 + 1, queued.1 + part.bytes());
        self.parts.insert(id, part);
        let delay = self.random.duration(self.faults.reorder);
        self.schedule_in(delay, SimEvent::Depart(id));
        if self.random.chance(self.faults.stall) {
            self.stop_link(from);
            let pause = self.random.duration(self.faults.stall_for);
            self.schedule_in(pause, SimEvent::Resume(from));
        }
        Ok(PostStatus::InFlight)
    }

    /// Claims a part's destination and fills it with random bytes; a part outside the grant will fail.
    fn claim(&mut self, id: u64, part: &mut Part) {
        let (from, to, lane) = (part.from, part.to, part.lane.id());
        self.link_mut(to).ledger.posted(lane);
        if !self.accepts(to, from) {
            // Too late: the destination has a new use and stays unchanged.
            return;
        }
        for page in &part.pages {
            let begin = page.destination_offset;
            let wanted = begin..begin.saturating_add(page.length);
            let grants = self.link(to).grants.get(&(page.destination, from));
            let inside = |grant: &Range<u64>| grant.start <= begin && wanted.end <= grant.end;
            if !grants.is_some_and(|grants| grants.iter().any(inside)) {
                let bytes = Some((to, page.destination, wanted));
                self.record_violation(
                    ViolationKind::OutsideGrant,
                    from,
                    to,
                    bytes,
                    Some(part.lane),
                );
                part.will_fail = true;
                part.pages.clear();
                return;
            }
        }
        let reuse = self.reuse;
        for page in &part.pages {
            if let Err(claimed) = self.link_mut(to).ledger.claim(id, lane, page, reuse) {
                let bytes = Some((to, page.destination, claimed));
                self.record_violation(ViolationKind::Overlap, from, to, bytes, Some(part.lane));
            }
            let end = page.destination_offset + page.length;
            self.randomize(to, page.destination, page.destination_offset..end);
        }
    }

    /// Fills a range with random bytes.
    fn randomize(&mut self, owner: Rank, region: RegionKey, range: Range<u64>) {
        let State { links, scratch, random, .. } = self;
        let Some(memory) = links[owner.0 as usize].regions.get(&region) else { return };
        scratch.resize((range.end - range.start) as usize, 0);
        random.fill(scratch);
        memory.copy_in(range.start as usize, scratch);
    }

    /// Current source bytes; `None` if a source region was released.
    fn read(&self, part: &Part) -> Option<Vec<u8>> {
        let mut data = vec![0; part.bytes() as usize];
        let mut rest = &mut data[..];
        for page in &part.pages {
            let (piece, tail) = rest.split_at_mut(page.length as usize);
            let memory = self.link(part.from).regions.get(&page.source)?;
            memory.copy_out(page.source_offset as usize, piece);
            rest = tail;
        }
        Some(data)
    }

    fn read_if(&mut self, id: u64, moment: ReadAt) {
        let Some(part) = self.parts.get(&id).filter(|part| part.read_at == moment) else { return };
        let data = self.read(part);
        if let Some(part) = self.parts.get_mut(&id) {
            part.data = data;
        }
    }

    pub fn depart(&mut self, id: u64) {
        let Some(part) = self.parts.get(&id).filter(|part| !part.ended) else { return };
        let (from, to, bytes) = (part.from, part.to, part.bytes());
        if self.link(from).stops > 0 {
            self.link_mut(from).deferred.push(SimEvent::Depart(id));
            return;
        }
        self.read_if(id, ReadAt::Departure);
        if self.is_cut(from, to) {
            self.fail(id, "the link is cut");
        } else if !self.accepts(to, from) {
            self.discard(id);
        } else {
            let (source, destination) = (self.host_of(from), self.host_of(to));
            self.model.start(self.now, FlowId(id), source, destination, bytes);
            if self.parts[&id].completes_early && !self.parts[&id].will_fail {
                self.complete_after_delay(id, Ok(()));
            }
        }
    }

    pub fn arrive(&mut self, id: u64) {
        let Some(part) = self.parts.get(&id).filter(|part| !part.ended) else { return };
        let (from, to, lane, will_fail) = (part.from, part.to, part.lane, part.will_fail);
        if self.link(to).stops > 0 {
            self.link_mut(to).deferred.push(SimEvent::Arrive(id));
            return;
        }
        self.read_if(id, ReadAt::Arrival);
        if self.is_cut(from, to) {
            return self.fail(id, "the link is cut");
        }
        if !self.accepts(to, from) {
            return self.discard(id);
        }
        if will_fail {
            return self.fail(id, "the network failed to deliver it");
        }
        if self.reuse && self.parts.get(&id).is_some_and(|part| !part.completed) {
            self.check_source(id);
        }
        self.land(id, u64::MAX);
        self.log_event(4, [u64::from(from.0), u64::from(to.0), id]);
        self.end(id);
        let sender = self.link(to).members.iter().position(|member| *member == from);
        let sender = Rank(sender.unwrap_or(usize::MAX) as u32);
        let raised = self.link(to).lanes.clone().is_some_and(|lanes| {
            lanes.arrive_from(sender, lane);
            lanes.value(lane.id()) > self.link(to).ledger.posted_to(lane.id())
        });
        if raised {
            self.record_violation(ViolationKind::RaisedBeyondPosted, from, to, None, Some(lane));
        }
        self.complete_after_delay(id, Ok(()));
    }

    /// Copies up to `limit` bytes to a part's destination.
    fn land(&mut self, id: u64, limit: u64) {
        let State { parts, links, .. } = self;
        let Some(part) = parts.get(&id) else { return };
        let owner = &mut links[part.to.0 as usize];
        let Some(mut rest) = part.data.as_deref() else { return };
        let mut left = limit;
        for page in &part.pages {
            let (piece, tail) = rest.split_at(page.length as usize);
            let take = left.min(page.length);
            if let Some(memory) = owner.regions.get(&page.destination) {
                memory.copy_in(page.destination_offset as usize, &piece[..take as usize]);
            }
            if take == page.length {
                owner.ledger.landed(id, page);
            }
            (rest, left) = (tail, left - take);
        }
    }

    /// Ends a part's transfer.
    fn end(&mut self, id: u64) {
        let Some(part) = self.parts.get_mut(&id) else { return };
        if !std::mem::replace(&mut part.ended, true) {
            let (to, lane) = (part.to, part.lane.id());
            self.link_mut(to).ledger.ended(lane);
        }
        self.remove_if_over(id);
    }

    /// Fails a part. A random prefix has landed, unless the destination had fenced the source.
    pub fn fail(&mut self, id: u64, why: &'static str) {
        let lands = |part: &&Part| part.data.is_some() && self.accepts(part.to, part.from);
        if let Some(bytes) = self.parts.get(&id).filter(lands).map(Part::bytes)
            && self.random.chance(0.5)
        {
            let limit = self.random.below(bytes + 1);
            self.land(id, limit);
        }
        let Some(part) = self.parts.get(&id) else { return };
        if part.outcome.is_some() {
            // The sender already has a completion without error, and so receives a loss.
            self.notify_peer(part.from, part.to, why);
        }
        self.end(id);
        self.complete_after_delay(id, Err(why));
    }

    /// Numbers of the parts that satisfy `predicate`, in post order.
    pub fn parts_matching(&self, predicate: impl Fn(&Part) -> bool) -> Vec<u64> {
        self.parts.iter().filter(|(_, part)| predicate(part)).map(|(id, _)| *id).collect()
    }

    /// Discards a part without a completion until the sender fences the peer.
    pub fn discard(&mut self, id: u64) {
        self.model.cancel(FlowId(id));
        self.end(id);
    }

    /// Schedules the completion, once.
    fn complete_after_delay(&mut self, id: u64, outcome: Result<(), &'static str>) {
        let delay = self.random.duration(self.faults.completion_delay);
        self.complete_in(delay, id, outcome);
    }

    pub fn complete_in(&mut self, delay: Duration, id: u64, outcome: Result<(), &'static str>) {
        if let Some(part) = self.parts.get_mut(&id).filter(|part| part.outcome.is_none()) {
            part.outcome = Some(outcome);
            self.schedule_in(delay, SimEvent::Complete(id));
        }
    }

    /// Records a violation if a part's source has changed since the post.
    fn check_source(&mut self, id: u64) {
        let Some(part) = self.parts.get(&id) else { return };
        let (from, to, lane, before) = (part.from, part.to, part.lane, part.digest);
        if self.read(part).is_some_and(|data| digest(0, &data) != before) {
            self.record_violation(ViolationKind::SourceChanged, from, to, None, Some(lane));
        }
    }

    pub fn complete(&mut self, id: u64) {
        let Some(part) = self.parts.get_mut(&id).filter(|part| !part.completed) else { return };
        part.completed = true;
        let (from, to, token, bytes) = (part.from, part.to, part.token, part.bytes());
        let result = part.outcome.unwrap_or(Ok(())).map_err(str::to_owned);
        // With reuse, a landed part's source is checked at that time.
        if !(self.reuse && part.ended) {
            self.check_source(id);
        }
        self.log_event(5, [u64::from(from.0), token, result.is_ok().into()]);
        self.unqueue(from, to, bytes);
        self.link_mut(from).completions.push((token, result));
        self.remove_if_over(id);
    }

    pub fn unqueue(&mut self, from: Rank, to: Rank, bytes: u64) {
        if let Some(queued) = self.link_mut(from).queued.get_mut(&to) {
            *queued = (queued.0 - 1, queued.1 - bytes);
        }
    }

    fn remove_if_over(&mut self, id: u64) {
        if self.parts.get(&id).is_some_and(|part| part.ended && part.completed) {
            self.parts.remove(&id);
        }
    }

    /// Gives credit for a lane: bytes that landed under it may be written again.
    pub fn credit(&mut self, owner: Rank, peer: Rank, lane: Lane) {
        if self.link(owner).ledger.in_flight_to(lane.id()) > 0 {
            self.record_violation(ViolationKind::EarlyCredit, owner, peer, None, Some(lane));
        }
        for (region, range) in self.link_mut(owner).ledger.credited(lane.id()) {
            // With reuse, they may have a new use by the owner.
            if !self.reuse {
                self.randomize(owner, region, range);
            }
        }
    }
}

/// Folds `bytes` into a digest.
pub(super) fn digest(digest: u64, bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(digest ^ bytes.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(sum ^ u64::from_le_bytes(word)).wrapping_add(sum)
    })
}
