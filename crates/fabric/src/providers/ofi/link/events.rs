//! Queue events: arrivals, completions, losses, and closing the link.

use super::super::super::presence::{Departures, PeerState};
use super::super::peer::OfiPeer;
use super::super::rail::{CompletionEvent, Rail};
use super::super::slots::SlotUse;
use super::super::wire::{immediate, lanes_of};
use super::OfiLink;
use super::losses::{is_loss, report_lost};
use crate::clock;
use crate::id_map::PeerMap;
use crate::link::{Link, Membership, Sink};
use crate::types::Lane;
use std::time::Duration;
use weft_control::Rank;

/// Time for which a dropped link waits until messages are delivered.
const LINGER: Duration = Duration::from_secs(1);

impl OfiLink {
    /// Takes one NIC's completions.
    #[inline(always)]
    pub(super) fn poll_rail(&mut self, index: usize, sink: &mut Sink) {
        let OfiLink { rails, peers, reports_due, departures, group, sleep, flushed_gpus, .. } =
            self;
        let mut unflushed = None;
        rails[index].poll(flushed_gpus, |event| {
            sleep.record_event();
            match event {
                CompletionEvent::Arrived(immediate, sender) => {
                    let due = (&mut *reports_due, &mut *departures);
                    Self::arrived(group, peers, due, immediate, sender, sink);
                }
                CompletionEvent::Ended(slot_use) => Self::ended(peers, slot_use, sink),
                CompletionEvent::Failed(slot_use, error, why) => {
                    Self::failed(peers, slot_use, error, why, sink)
                }
                CompletionEvent::Unflushed(why) => unflushed = Some(why),
            }
        });
        if let Some(why) = unflushed {
            self.lose_rail(index, &why, sink);
        }
    }

    /// Reports all peers on a failed NIC as lost.
    #[cold]
    fn lose_rail(&mut self, index: usize, why: &str, sink: &mut Sink) {
        let why = format!("{}: {why}", self.rails[index].nic());
        for peer in self.peers.values_mut().filter(|peer| peer.endpoints.len() > index) {
            report_lost(peer, why.clone(), sink);
        }
    }

    /// Sends due consumption reports, as far as the provider accepts them.
    #[cold]
    pub(super) fn report(&mut self, sink: &mut Sink) {
        let OfiLink { reports_due, peers, rails, .. } = self;
        reports_due.retain(|&rank| {
            let Some(peer) = peers.get_mut(Rank(rank)) else { return false };
            while peer.reports_due > 0 && peer.state == PeerState::Open {
                let immediate = immediate(peer.remote.consumed, None);
                let slot_use = SlotUse::Control { peer: rank };
                match rails[0].signal(peer.endpoints[0], immediate, 0, slot_use) {
                    Ok(true) => {
                        peer.reports_due -= 1;
                        peer.control += 1;
                    }
                    Ok(false) => return true,
                    Err(error) => report_lost(peer, rails[0].describe(error), sink),
                }
            }
            false
        });
    }

    /// Raises an arrival's lanes, and counts it as consumed.
    #[inline]
    pub(super) fn arrived(
        group: &Membership,
        peers: &mut PeerMap<OfiPeer>,
        (reports_due, departures): (&mut Vec<u32>, &mut Departures),
        immediate: u64,
        sender: Option<Rank>,
        sink: &mut Sink,
    ) {
        let mut raise = |lane: Lane| {
            let holder = match sender {
                None => group.lanes.arrive_in_poll(lane),
                Some(sender) => group.lanes.arrive_from_in_poll(sender, lane),
            };
            if holder.is_some() {
                sink.lane_raised(lane.id());
            }
            holder
        };
        let (lane, piggyback) = lanes_of(immediate);
        if let Some(piggyback) = piggyback {
            raise(piggyback);
        }
        // A dropped arrival has taken a queue entry too.
        let holder = raise(lane).or(sender).or_else(|| group.lanes.last_holder(lane));
        let peer = holder.and_then(|holder| peers.get_mut(holder));
        let Some(peer) = peer else { return };
        let rank = peer.rank.0;
        if peer.is_report(lane) {
            if peer.is_leaving(&group.lanes) {
                departures.add(peer.rank);
            }
        } else if peer.incoming.consume() {
            peer.reports_due += 1;
            if !reports_due.contains(&rank) {
                reports_due.push(rank);
            }
        }
    }

    pub(super) fn ended(peers: &mut PeerMap<OfiPeer>, slot_use: SlotUse, sink: &mut Sink) {
        match slot_use {
            SlotUse::Part { token, peer, is_bulk } => {
                if let Some(peer) = peers.get_mut(Rank(peer)) {
                    peer.parts -= 1;
                    peer.bulk -= u32::from(is_bulk);
                }
                sink.done(token);
            }
            SlotUse::Control { peer } => {
                if let Some(peer) = peers.get_mut(Rank(peer)) {
                    peer.control -= 1;
                }
            }
            SlotUse::Abandoned | SlotUse::Receive | SlotUse::Free => {}
        }
    }

    /// Handles a failed operation. If the error ends the connection, the peer's parts wait for the fence:
    /// the control plane may report an orderly leave.
    #[cold]
    pub(super) fn failed(
        peers: &mut PeerMap<OfiPeer>,
        slot_use: SlotUse,
        error: i32,
        why: String,
        sink: &mut Sink,
    ) {
        let (token, peer, is_bulk) = match slot_use {
            SlotUse::Part { token, peer, is_bulk } => (Some(token), peer, is_bulk),
            SlotUse::Control { peer } => (None, peer, false),
            SlotUse::Abandoned | SlotUse::Receive | SlotUse::Free => return,
        };
        let Some(peer) = peers.get_mut(Rank(peer)) else { return };
        peer.bulk -= u32::from(is_bulk);
        peer.parts -= u32::from(token.is_some());
        peer.control -= u32::from(token.is_none());
        if !is_loss(error) && peer.state != PeerState::Lost {
            match token {
                Some(token) => sink.failed(token, why),
                None => report_lost(peer, why, sink),
            }
            return;
        }
        peer.parked.extend(token);
        report_lost(peer, why, sink);
    }

    /// Closes the endpoints once no peer is connected.
    pub(super) fn close_if_unused(&mut self) {
        if self.open == 0 {
            self.rails.iter_mut().for_each(Rail::close);
            self.sleep.stop();
            self.kept.clear();
        }
    }
}

impl Drop for OfiLink {
    /// Delivers posted parts before the link closes: a provider may keep them until it is polled.
    fn drop(&mut self) {
        let mut sink = Sink::default();
        let deadline = clock::now().after(LINGER);
        let lanes = self.group.lanes.clone();
        let is_here = |peer: &&OfiPeer| {
            peer.state == PeerState::Open && peer.is_connected(&lanes) && !peer.is_leaving(&lanes)
        };
        let mut to_leave: Vec<Rank> =
            self.peers.values().filter(is_here).map(|peer| peer.rank).collect();
        loop {
            to_leave.retain(|&peer| !self.signal_presence(peer, self.farewell, &mut sink));
            self.poll(clock::now(), &mut sink);
            let mut here = self.peers.values().filter(is_here);
            let is_waiting = here.any(|peer| peer.control + peer.parts > 0) || !to_leave.is_empty();
            if !is_waiting || clock::now() >= deadline {
                return;
            }
            std::thread::yield_now();
        }
    }
}
