//! A part's way from post to completion.
//!
//! ```text
//! post -- reorder delay --> depart -- network model --> arrive: bytes land, the lane rises
//!   \__________ the source is read at one of these three moments __________/
//!                               \__ the completion follows the read, before the arrival or after
//! ```
//!
//! A part that meets a broken link fails. One that meets a dead or a fencing rank vanishes: its sender
//! hears that the peer is lost and, by fencing it in turn, drains the part.

use super::checks::Breach;
use super::random::digest;
use super::state::{Happening, State};
use crate::link::Work;
use crate::model::FlowId;
use crate::types::{Lane, Page, RegionKey};
use std::ops::Range;
use std::time::Duration;
use weft_control::Rank;

/// Whether a post was taken.
pub(super) enum Taken {
    Yes,
    QueueFull,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadAt {
    Post,
    Departure,
    Arrival,
}

pub(super) struct Part {
    pub from: Rank,
    pub to: Rank,
    pub token: u64,
    pub lane: Lane,
    pub pages: Vec<Page>,
    pub read_at: ReadAt,
    /// What was read, page after page.
    pub data: Option<Vec<u8>>,
    /// Of the source at post.
    pub digest: u64,
    /// It will not raise its lane.
    pub doomed: bool,
    pub completes_early: bool,
    /// It is on no wire any more: landed, failed or vanished.
    pub ended: bool,
    /// Its completion is due, with this.
    pub outcome: Option<Result<(), &'static str>>,
    pub completed: bool,
}

impl Part {
    pub fn bytes(&self) -> u64 {
        self.pages.iter().map(|page| page.length).sum()
    }
}

const FULL_FOR: Duration = Duration::from_micros(1);

impl State {
    pub fn post(&mut self, from: Rank, work: &Work<'_>) -> Result<Taken, String> {
        let to = work.peer;
        let cut_off = self.at(from).fenced.contains(&to);
        if cut_off || self.at(from).dead {
            return Err(format!("{to} is cut off"));
        }
        if let Some(lane) = work.credits {
            // At the first offer, even if the queue is full: from here on the owner may use the bytes.
            self.credit(from, to, lane);
        }
        let bytes: u64 = work.pages.iter().map(|page| page.length).sum();
        let (parts, queued) = self.at(from).queued.get(&to).copied().unwrap_or_default();
        let full = parts >= self.queue_parts
            || (parts > 0 && queued.saturating_add(bytes) > self.queue_bytes);
        if full {
            return Ok(Taken::QueueFull);
        }
        if self.random.chance(self.faults.full) {
            self.schedule_in(FULL_FOR, Happening::Wake);
            return Ok(Taken::QueueFull);
        }
        self.posted += 1;
        let id = self.posted;
        self.note(3, [u64::from(from.0), u64::from(to.0), id]);
        let mut part = Part {
            from,
            to,
            token: work.token,
            lane: work.lane,
            pages: work.pages.iter().filter(|page| page.length > 0).copied().collect(),
            read_at: ReadAt::Post,
            data: None,
            digest: 0,
            doomed: self.random.chance(self.faults.fail) || self.faults.failing_part == Some(id),
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
        let queued = self.at_mut(from).queued.entry(to).or_default();
        *queued = (queued.0 + 1, queued.1 + part.bytes());
        self.parts.insert(id, part);
        let delay = self.random.up_to(self.faults.reorder);
        self.schedule_in(delay, Happening::Depart(id));
        if self.random.chance(self.faults.stall) {
            self.stop_end(from);
            let pause = self.random.up_to(self.faults.stall_for);
            self.schedule_in(pause, Happening::Resume(from));
        }
        Ok(Taken::Yes)
    }

    /// Claims a part's destination, fills it with chance, and dooms the part if it may not go there.
    fn claim(&mut self, id: u64, part: &mut Part) {
        let (from, to, lane) = (part.from, part.to, part.lane.id());
        self.at_mut(to).ledger.posted(lane);
        if !self.accepts(to, from) {
            // It comes too late: whatever now lies there is none of its business, and stays.
            return;
        }
        for page in &part.pages {
            let begin = page.destination_offset;
            let wanted = begin..begin.saturating_add(page.length);
            let grants = self.at(to).grants.get(&(page.destination, from));
            let inside = |grant: &Range<u64>| grant.start <= begin && wanted.end <= grant.end;
            if !grants.is_some_and(|grants| grants.iter().any(inside)) {
                let bytes = Some((to, page.destination, wanted));
                self.violated(Breach::OutsideGrant, from, to, bytes, Some(part.lane));
                part.doomed = true;
                part.pages.clear();
                return;
            }
        }
        for page in &part.pages {
            if let Err(held) = self.at_mut(to).ledger.claim(id, lane, page) {
                let bytes = Some((to, page.destination, held));
                self.violated(Breach::Overlap, from, to, bytes, Some(part.lane));
            }
            let end = page.destination_offset + page.length;
            self.scramble(to, page.destination, page.destination_offset..end);
        }
    }

    /// Fills bytes with chance.
    fn scramble(&mut self, owner: Rank, region: RegionKey, range: Range<u64>) {
        let State { ranks, scratch, random, .. } = self;
        let Some(memory) = ranks[owner.0 as usize].regions.get(&region) else { return };
        scratch.resize((range.end - range.start) as usize, 0);
        random.fill(scratch);
        memory.copy_in(range.start as usize, scratch);
    }

    /// The source's bytes now; `None` if a region that holds them is gone.
    fn read(&self, part: &Part) -> Option<Vec<u8>> {
        let mut data = vec![0; part.bytes() as usize];
        let mut rest = &mut data[..];
        for page in &part.pages {
            let (piece, tail) = rest.split_at_mut(page.length as usize);
            let memory = self.at(part.from).regions.get(&page.source)?;
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
        if self.at(from).stops > 0 {
            self.at_mut(from).deferred.push(Happening::Depart(id));
            return;
        }
        self.read_if(id, ReadAt::Departure);
        if self.is_cut(from, to) {
            self.fail(id, "the link is cut");
        } else if !self.accepts(to, from) {
            self.vanish(id);
        } else {
            let (source, destination) = (self.host_of(from), self.host_of(to));
            self.model.start(self.now, FlowId(id), source, destination, bytes);
            if self.parts[&id].completes_early && !self.parts[&id].doomed {
                self.finish(id, Ok(()));
            }
        }
    }

    pub fn arrive(&mut self, id: u64) {
        let Some(part) = self.parts.get(&id).filter(|part| !part.ended) else { return };
        let (from, to, lane, doomed) = (part.from, part.to, part.lane, part.doomed);
        if self.at(to).stops > 0 {
            self.at_mut(to).deferred.push(Happening::Arrive(id));
            return;
        }
        self.read_if(id, ReadAt::Arrival);
        if self.is_cut(from, to) {
            return self.fail(id, "the link is cut");
        }
        if !self.accepts(to, from) {
            return self.vanish(id);
        }
        if doomed {
            return self.fail(id, "the network gave up on it");
        }
        self.land(id, u64::MAX);
        self.note(4, [u64::from(from.0), u64::from(to.0), id]);
        self.end(id);
        let sender = self.at(to).members.iter().position(|member| *member == from);
        let sender = Rank(sender.unwrap_or(usize::MAX) as u32);
        let raised = self.at(to).lanes.clone().is_some_and(|lanes| {
            lanes.arrive_from(sender, lane);
            lanes.value(lane.id()) > self.at(to).ledger.posted_to(lane.id())
        });
        if raised {
            self.violated(Breach::RaisedBeyondPosted, from, to, None, Some(lane));
        }
        self.finish(id, Ok(()));
    }

    /// Copies up to `limit` of a part's bytes to where they belong.
    fn land(&mut self, id: u64, limit: u64) {
        let State { parts, ranks, .. } = self;
        let Some(part) = parts.get(&id) else { return };
        let owner = &mut ranks[part.to.0 as usize];
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

    /// The part is on no wire any more.
    fn end(&mut self, id: u64) {
        let Some(part) = self.parts.get_mut(&id) else { return };
        if !std::mem::replace(&mut part.ended, true) {
            let (to, lane) = (part.to, part.lane.id());
            self.at_mut(to).ledger.ended(lane);
        }
        self.forget_if_over(id);
    }

    /// The part fails; nobody knows what was written, unless its destination had cut it off before.
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
            // Its sender believes it done, so it must hear of this in another way.
            self.notify_one(part.from, part.to, why);
        }
        self.end(id);
        self.finish(id, Err(why));
    }

    /// The parts that are such, in the order in which they were posted.
    pub fn parts_where(&self, such: impl Fn(&Part) -> bool) -> Vec<u64> {
        self.parts.iter().filter(|(_, part)| such(part)).map(|(id, _)| *id).collect()
    }

    /// Nothing is heard of the part again until its sender fences the peer.
    pub fn vanish(&mut self, id: u64) {
        self.model.cancel(FlowId(id));
        self.end(id);
    }

    /// Makes the completion due, once.
    fn finish(&mut self, id: u64, outcome: Result<(), &'static str>) {
        let delay = self.random.up_to(self.faults.completion_delay);
        self.finish_in(delay, id, outcome);
    }

    pub fn finish_in(&mut self, delay: Duration, id: u64, outcome: Result<(), &'static str>) {
        if let Some(part) = self.parts.get_mut(&id).filter(|part| part.outcome.is_none()) {
            part.outcome = Some(outcome);
            self.schedule_in(delay, Happening::Complete(id));
        }
    }

    pub fn complete(&mut self, id: u64) {
        let Some(part) = self.parts.get_mut(&id).filter(|part| !part.completed) else { return };
        part.completed = true;
        let (from, to, token, lane) = (part.from, part.to, part.token, part.lane);
        let (bytes, before) = (part.bytes(), part.digest);
        let result = part.outcome.unwrap_or(Ok(())).map_err(str::to_owned);
        let changed = self.read(&self.parts[&id]).is_some_and(|data| digest(0, &data) != before);
        if changed {
            self.violated(Breach::SourceChanged, from, to, None, Some(lane));
        }
        self.note(5, [u64::from(from.0), token, result.is_ok().into()]);
        self.unqueue(from, to, bytes);
        self.at_mut(from).completions.push((token, result));
        self.forget_if_over(id);
    }

    pub fn unqueue(&mut self, from: Rank, to: Rank, bytes: u64) {
        if let Some(queued) = self.at_mut(from).queued.get_mut(&to) {
            *queued = (queued.0 - 1, queued.1 - bytes);
        }
    }

    fn forget_if_over(&mut self, id: u64) {
        if self.parts.get(&id).is_some_and(|part| part.ended && part.completed) {
            self.parts.remove(&id);
        }
    }

    /// An owner gives credit: what landed under its lane may be written again.
    pub fn credit(&mut self, owner: Rank, peer: Rank, lane: Lane) {
        if self.at(owner).ledger.in_flight_to(lane.id()) > 0 {
            self.violated(Breach::EarlyCredit, owner, peer, None, Some(lane));
        }
        for (region, range) in self.at_mut(owner).ledger.credited(lane.id()) {
            self.scramble(owner, region, range);
        }
    }
}
