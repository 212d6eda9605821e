//! The receiving end: slots that were filled, checked and copied.

use super::super::copy::outbox::CopyPart;
use super::super::copy::{CopyEngine, PageCopy};
use super::link::{StagedLink, signal};
use super::peer::{IncomingPart, StagedPeer};
use super::wire::{Header, MAX_HEADER, turn_word};
use crate::id_map::RegionMap;
use crate::lane_table::LaneTable;
use crate::link::{PostStatus, Sink};
use crate::memory::{Memory, MemoryKind};
use crate::types::RegionKey;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weft_control::Rank;

/// A part whose copies have been started.
struct StartedCopies {
    part: IncomingPart,
    /// Copies in queues.
    copies: usize,
    /// Reason why not all were started.
    failure: Option<String>,
}

impl StagedLink {
    /// Starts copies out of slots that were filled, and ends those that are complete.
    pub(super) fn receive(&mut self, sink: &mut Sink) {
        let StagedLink { peers, regions, engine, group, counters, peers_raise, .. } = self;
        for (rank, peer) in peers.iter_mut() {
            // A peer that raises lanes here also raises a part's lane.
            let lanes = (!*peers_raise).then_some(&*group.lanes);
            for slot in 0..peer.shape.slots as usize {
                let raised = group.lanes.value(peer.ours.filled(slot).id());
                if peer.is_refused || !peer.arrived.is_behind(slot, raised) {
                    continue;
                }
                let arrived = peer.arrived.arrive(slot, raised);
                let engine = engine.as_deref_mut();
                let started = arrived.and_then(|turn| {
                    turn.map(|turn| Ok((turn, start(peer, turn, regions, engine)?))).transpose()
                });
                match started {
                    Ok(None) => {}
                    Ok(Some((turn, StartedCopies { part, copies, failure }))) => {
                        let lane = part.lane;
                        peer.incoming[slot] = Some(part);
                        let part = CopyPart { token: turn, lane, failure };
                        if copies == 0 {
                            finish(rank, peer, part, lanes, sink);
                        } else {
                            peer.scatters.add(part, copies);
                        }
                    }
                    Err(why) => {
                        counters.refused_slots.fetch_add(1, Ordering::Relaxed);
                        log::error!("{rank}: protocol violation: {why}");
                        peer.refuse(format!("protocol violation: {why}"));
                    }
                }
            }
            if let Some(engine) = engine
                && !peer.scatters.is_empty()
            {
                let mut scatters = std::mem::take(&mut peer.scatters);
                scatters.seal(&mut **engine);
                scatters.take_finished(&mut **engine, |part| finish(rank, peer, part, lanes, sink));
                peer.scatters = scatters;
            }
        }
    }

    /// Reports freed slots to the peers, as far as the inner link accepts that, and losses whose copies are
    /// complete.
    pub(super) fn report(&mut self, sink: &mut Sink) {
        let StagedLink { peers, inner: Some(inner), events, .. } = self else { return };
        for (rank, peer) in peers.iter_mut() {
            while peer.owed > 0 {
                match inner.post(&signal(rank, peer.theirs.freed()), events) {
                    Ok(PostStatus::Full) => break,
                    Ok(_) => peer.owed -= 1,
                    Err(why) => {
                        peer.owed = 0;
                        peer.lose(why);
                    }
                }
            }
            if !peer.has_incoming()
                && let Some(why) = peer.loss.take()
            {
                peer.is_loss_reported = true;
                sink.lost.push((rank, why));
            }
        }
    }
}

/// Checks the header in a slot and starts the copies.
///
/// # Errors
/// The violation. No byte was written then.
fn start(
    peer: &mut StagedPeer,
    turn: u64,
    regions: &RegionMap<Arc<Memory>>,
    mut engine: Option<&mut (dyn CopyEngine + 'static)>,
) -> Result<StartedCopies, String> {
    let (_, at) = peer.shape.slot(turn);
    let slots = peer.memory.clone().ok_or("a slot was filled that was not granted")?;
    // The peer may change the slot meanwhile.
    let mut header = [0; MAX_HEADER];
    let header = &mut header[..MAX_HEADER.min(peer.shape.slot_bytes as usize)];
    slots.copy_out(at as usize, header);
    let header = Header::parse(header, peer.shape.parts)?;
    if header.turn != turn_word(turn) {
        return Err(format!("a header for turn {}, expected {}", header.turn, turn_word(turn)));
    }
    for page in header.pages() {
        peer.granted.check(page.key.0, page.offset, page.length.into())?;
        let memory =
            regions.get(page.key).ok_or_else(|| format!("region {} is unknown", page.key.0))?;
        // A granted range is within the region; this holds even if that were violated.
        let end = page.offset.checked_add(page.length.into());
        if end.is_none_or(|end| end > memory.len() as u64) {
            return Err(format!(
                "region {} ends before {}+{}",
                page.key.0, page.offset, page.length
            ));
        }
    }
    let part = IncomingPart { lane: header.lane, destinations: Vec::new() };
    let mut started = StartedCopies { part, copies: 0, failure: None };
    let mut place = at + header.len() as u64;
    for page in header.pages() {
        let (length, offset) = (u64::from(page.length), page.offset);
        let Some(memory) = regions.get(page.key).filter(|_| length > 0) else { continue };
        match (memory.kind(), &mut engine) {
            (MemoryKind::Host, _) => {
                slots.copy_to(place as usize, memory, offset as usize, length as usize);
            }
            (MemoryKind::Device(_), None) => {
                started.failure = Some("there is no copy engine".into())
            }
            (MemoryKind::Device(device), Some(engine)) => {
                let (from, to) = (slots.address() + place, memory.address() + offset);
                // SAFETY: the pin is dropped before the slots, with the peer.
                let by_kernels =
                    unsafe { peer.pinned.pin(&mut **engine, device, RegionKey(0), &slots) };
                let page = PageCopy { to, from, length };
                // SAFETY: both ranges were checked, and both memories are kept until the copy's event: here, and
                // beyond a fence by `drain`. Kernels reach pinned slots.
                let copied = unsafe { peer.scatters.copy(&mut **engine, device, page, by_kernels) };
                match copied {
                    Ok(()) => {
                        started.copies += 1;
                        started.part.destinations.push(memory.clone());
                    }
                    Err(why) => started.failure = Some(why),
                }
            }
        }
        if started.failure.is_some() {
            break;
        }
        place += length;
    }
    Ok(started)
}

/// Ends a part whose copies are complete: raises the lane, and frees the slot.
fn finish(
    rank: Rank,
    peer: &mut StagedPeer,
    part: CopyPart,
    lanes: Option<&LaneTable>,
    sink: &mut Sink,
) {
    let CopyPart { token: turn, lane, failure } = part;
    peer.incoming[peer.shape.slot(turn).0] = None;
    if let Some(why) = failure {
        return peer.refuse(format!("a copy failed: {why}"));
    }
    // All bytes are at the destination, visible to who reads the lane: see `CopyEngine::is_complete`.
    if let Some(lanes) = lanes
        && lanes.arrive_from_in_poll(rank, lane).is_some()
    {
        sink.lane_raised(lane.id());
    }
    peer.arrived.copied(turn);
    peer.owed += peer.arrived.free();
}
