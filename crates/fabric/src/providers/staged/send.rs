//! The sending end: pages into a slot, the slot to the peer.

use super::super::copy::PageCopy;
use super::super::copy::outbox::CopyPart;
use super::link::{CONTROL_SLOT, StagedLink, own_token, signal};
use super::peer::{OutgoingPart, Stage, StagedPeer};
use super::wire::{Header, header_bytes, turn_word};
use crate::link::{PostStatus, Sink, WorkRequest};
use crate::memory::MemoryKind;
use crate::types::{Page, RegionKey};
use std::sync::atomic::Ordering;
use weft_control::Rank;

/// Error for GPU memory toward a peer without slots.
const UNSTAGED: &str =
    "it is not connected, or stages no GPU memory; leave WEFT_STAGED unset there";

impl StagedLink {
    /// True if a part has a page in a GPU.
    pub(super) fn is_staged(&self, work: &WorkRequest<'_>) -> bool {
        let in_gpus = self.peers.get(work.peer).map(|peer| &peer.in_gpus);
        work.pages.iter().filter(|page| page.length > 0).any(|page| {
            let source = self.regions.get(page.source);
            source.is_some_and(|memory| memory.host().is_none())
                || in_gpus.is_some_and(|regions| regions.contains(&page.destination))
        })
    }

    /// Starts gathering a part into a slot.
    pub(super) fn stage(&mut self, work: &WorkRequest<'_>) -> Result<PostStatus, String> {
        let StagedLink { peers, regions, engine, pages, header, counters, .. } = self;
        let peer = peers.get_mut(work.peer).ok_or(UNSTAGED)?;
        let slots = peer.memory.clone().filter(|_| peer.has_slots).ok_or("it granted no slots")?;
        pages.clear();
        pages.extend(work.pages.iter().filter(|page| page.length > 0));
        let mut payload = 0u64;
        for page in &*pages {
            peer.imported.check(page.destination.0, page.destination_offset, page.length)?;
            let length = regions.get(page.source).map_or(0, |memory| memory.len() as u64);
            if page.source_offset.checked_add(page.length).is_none_or(|end| end > length) {
                return Err(format!("source outside region {}", page.source.0));
            }
            payload = payload.saturating_add(page.length);
        }
        let rule = peer.shape.parts;
        if payload > rule.max_part_bytes || pages.len() > rule.max_pages_per_part as usize {
            let pages = pages.len();
            return Err(format!(
                "part of {pages} pages and {payload} bytes: above the pair's limits"
            ));
        }
        let Some(turn) = peer.next_turn(work.class) else { return Ok(PostStatus::Full) };
        let (slot, at) = peer.shape.slot(turn);
        let begin = peer.shape.bytes() + at;
        Header::put(header, work.lane, turn_word(turn), pages);
        slots.copy_in(begin as usize, header);
        let head = header_bytes(pages.len()) as u64;
        let mut place = begin + head;
        let (mut copies, mut failure, mut sources) = (0, None, Vec::new());
        for page in &*pages {
            let Some(source) = regions.get(page.source) else { continue };
            match source.kind() {
                MemoryKind::Host => {
                    let (from, length) = (page.source_offset as usize, page.length as usize);
                    source.copy_to(from, &slots, place as usize, length);
                }
                MemoryKind::Device(device) => {
                    let engine = engine.as_deref_mut().ok_or("there is no copy engine")?;
                    let (from, to) =
                        (source.address() + page.source_offset, slots.address() + place);
                    // SAFETY: the pin is dropped before the slots, with the peer.
                    let by_kernels =
                        unsafe { peer.pinned.pin(engine, device, RegionKey(0), &slots) };
                    let copy = PageCopy { to, from, length: page.length };
                    // SAFETY: both ranges were checked, and both memories are kept until the copy's event: here,
                    // and beyond a fence by `drain`. Kernels reach pinned slots.
                    let copied = unsafe { peer.gathers.copy(engine, device, copy, by_kernels) };
                    if let Err(why) = copied {
                        failure = Some(why);
                        break;
                    }
                    copies += 1;
                    sources.push(source.clone());
                }
            }
            place += page.length;
        }
        match (copies, failure) {
            (0, Some(why)) => return Err(why),
            (0, None) => peer.ready.push_back(turn),
            // A part is not reported as failed while some pages are still read.
            (copies, failure) => {
                peer.gathers.add(CopyPart { token: turn, lane: work.lane, failure }, copies);
            }
        }
        peer.sent.take();
        counters.staged_parts.fetch_add(1, Ordering::Relaxed);
        peer.outgoing[slot] = Some(OutgoingPart {
            token: work.token,
            lane: work.lane,
            class: work.class,
            length: head + payload,
            stage: if copies == 0 { Stage::Ready } else { Stage::Copying },
            is_reported: false,
            is_freed: false,
            sources,
        });
        Ok(PostStatus::InFlight)
    }

    /// Makes slots ready whose pages are all there.
    pub(super) fn finish_gathers(&mut self, sink: &mut Sink) {
        let StagedLink { engine: Some(engine), peers, .. } = self else { return };
        for (_, peer) in peers.iter_mut().filter(|(_, peer)| !peer.gathers.is_empty()) {
            let StagedPeer { gathers, outgoing, ready, shape, .. } = peer;
            gathers.seal(&mut **engine);
            gathers.take_finished(&mut **engine, |part| {
                let slot = &mut outgoing[shape.slot(part.token).0];
                let Some(staged) = slot else { return };
                staged.sources.clear();
                match part.failure {
                    None => {
                        staged.stage = Stage::Ready;
                        ready.push_back(part.token);
                    }
                    // The turn is lost: a failed write ends the group.
                    Some(why) => {
                        sink.failed(staged.token, why);
                        *slot = None;
                    }
                }
            });
        }
    }

    /// Posts slots that are ready, flushes the inner link, and takes the events.
    pub(super) fn send_ready(&mut self, sink: &mut Sink) {
        let Some(inner) = &mut self.inner else { return };
        let mut done = Vec::new();
        for (rank, peer) in self.peers.iter_mut() {
            for _ in 0..peer.ready.len() {
                let Some(turn) = peer.ready.pop_front() else { break };
                let (slot, at) = peer.shape.slot(turn);
                let Some(part) = &mut peer.outgoing[slot] else { continue };
                let page = Page {
                    source: StagedLink::slots_key(self.passes_keys, rank),
                    source_offset: peer.shape.bytes() + at,
                    destination: StagedLink::slots_key(self.passes_keys, self.group.rank),
                    destination_offset: at,
                    length: part.length,
                };
                let work = WorkRequest {
                    token: own_token(slot as u64, rank),
                    peer: rank,
                    lane: peer.theirs.filled(slot),
                    credits: None,
                    piggyback: None,
                    class: part.class,
                    pages: &[page],
                };
                match inner.post(&work, &mut self.events) {
                    Ok(PostStatus::Full) => peer.ready.push_back(turn),
                    Ok(PostStatus::InFlight) => part.stage = Stage::Posted { pending: 1 },
                    Ok(PostStatus::Done) => {
                        part.stage = Stage::Posted { pending: 0 };
                        done.push((rank, slot));
                    }
                    Err(why) => {
                        sink.failed(part.token, why);
                        peer.outgoing[slot] = None;
                    }
                }
            }
        }
        inner.flush(&mut self.events);
        if self.events.held {
            // What the inner link has copied and not sent is in flight.
            for (rank, slot) in done {
                let pending = inner.hold(rank, own_token(slot as u64, rank));
                let part = self.peers.get_mut(rank).and_then(|peer| peer.outgoing[slot].as_mut());
                if let Some(part) = part {
                    part.stage = Stage::Posted { pending };
                }
            }
        }
        sink.held |= std::mem::take(&mut self.events.held);
        self.take_events(sink);
        self.finish_posted(sink);
    }

    /// Reports parts whose slots have left, and clears slots that are free again.
    fn finish_posted(&mut self, sink: &mut Sink) {
        let StagedLink { peers, inner: Some(inner), events, peers_raise, group, .. } = self else {
            return;
        };
        for (rank, peer) in peers.iter_mut().filter(|(_, peer)| peer.has_outgoing()) {
            // Read before the freed slots: a peer frees its last ones, and then leaves.
            let has_left = *peers_raise && group.lanes.value(peer.ours.left().id()) > 0;
            let freed = group.lanes.value(peer.ours.freed().id());
            if peer.sent.is_behind(freed)
                && !peer.is_refused
                && let Err(why) = free(peer, freed)
            {
                self.counters.refused_slots.fetch_add(1, Ordering::Relaxed);
                log::error!("{rank}: protocol violation: {why}");
                peer.refuse(format!("protocol violation: {why}"));
            }
            for slot in &mut peer.outgoing {
                let Some(part) = slot else { continue };
                if part.stage != (Stage::Posted { pending: 0 }) {
                    continue;
                }
                if *peers_raise && part.is_freed {
                    match inner.post(&signal(rank, part.lane), events) {
                        Ok(PostStatus::Full) => continue,
                        Ok(_) => {}
                        Err(why) => {
                            sink.failed(part.token, why);
                            *slot = None;
                            continue;
                        }
                    }
                }
                if !part.is_reported && (part.is_freed || !*peers_raise) {
                    part.is_reported = true;
                    sink.done(part.token);
                }
                if part.is_freed {
                    *slot = None;
                }
            }
            let unfreed = |part: &OutgoingPart| !part.is_freed;
            if has_left && peer.outgoing.iter().flatten().any(unfreed) {
                // No link reports that a peer over shared memory has gone.
                peer.lose("it has left with slots that it had not freed".into());
            }
        }
    }

    /// Takes the inner link's events: slot completions, the engine's completions, losses.
    pub(super) fn take_events(&mut self, sink: &mut Sink) {
        let StagedLink { events, peers, .. } = self;
        for token in events.completed.drain(..) {
            match slot_of(token) {
                None => sink.done(token),
                Some((slot, rank)) => {
                    let part =
                        peers.get_mut(rank).and_then(|peer| peer.outgoing.get_mut(slot)?.as_mut());
                    if let Some(OutgoingPart { stage: Stage::Posted { pending }, .. }) = part {
                        *pending = pending.saturating_sub(1);
                    }
                }
            }
        }
        for (token, why) in events.failures.drain(..) {
            match slot_of(token) {
                None => sink.failed(token, why),
                // A freed slot, or a lane that this rank raises for a part: the peer never learns of it.
                Some((slot, rank)) if slot == CONTROL_SLOT as usize => {
                    if let Some(peer) = peers.get_mut(rank) {
                        peer.lose(why);
                    }
                }
                Some((slot, rank)) => {
                    let part =
                        peers.get_mut(rank).and_then(|peer| peer.outgoing.get_mut(slot)?.take());
                    if let Some(part) = part.filter(|part| !part.is_reported) {
                        sink.failed(part.token, why);
                    }
                }
            }
        }
        for (rank, why) in events.lost.drain(..) {
            match peers.get_mut(rank) {
                Some(peer) => peer.lose(why),
                None => sink.lost.push((rank, why)),
            }
        }
        sink.raised.append(&mut events.raised);
    }
}

/// Counts slots that the peer has freed.
fn free(peer: &mut StagedPeer, freed: u64) -> Result<(), String> {
    for turn in peer.sent.free(freed)? {
        if let Some(part) = &mut peer.outgoing[peer.shape.slot(turn).0] {
            if !matches!(part.stage, Stage::Posted { .. }) {
                return Err("a slot was freed before it was filled".into());
            }
            part.is_freed = true;
        }
    }
    Ok(())
}

/// Slot and peer in one of our tokens; `None` for the engine's.
fn slot_of(token: u64) -> Option<(usize, Rank)> {
    let is_own = token >> 40 == own_token(0, Rank(0)) >> 40;
    is_own.then_some(((token >> 24 & 0xffff) as usize, Rank(token as u32 & 0xff_ffff)))
}
