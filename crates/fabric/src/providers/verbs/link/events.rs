//! Queue events: arrivals, completions, losses, and closing the link.

use super::super::super::presence::PeerState;
use super::super::chains::ChainUse;
use super::super::objects::AsyncEvent;
use super::super::pair::RequestId;
use super::super::peer::VerbsPeer;
use super::super::rail::{BATCH, Rail};
use super::super::sys;
use super::losses::report_lost;
use super::{POLLS_PER_EVENT, VerbsLink};
use crate::clock;
use crate::link::{Link, Sink};
use crate::types::Lane;
use std::time::Duration;
use weft_control::Rank;

/// Reads per poll and NIC.
const BATCHES: usize = 8;
/// Time for which a dropped link waits until messages are delivered.
const LINGER: Duration = Duration::from_secs(1);

impl VerbsPeer {
    /// Parks the tokens for all parts in flight: none completes by itself any more.
    pub(super) fn park_all(&mut self) {
        let VerbsPeer { pairs, parked, .. } = self;
        for chain_use in pairs.iter_mut().flat_map(|pair| pair.abandon()) {
            if let ChainUse::Part { token, .. } = chain_use {
                parked.push(token);
            }
        }
        self.bulk = 0;
    }
}

impl VerbsLink {
    /// Takes one NIC's completions.
    #[inline(always)]
    pub(super) fn poll_rail(&mut self, index: usize, sink: &mut Sink) {
        for _ in 0..BATCHES {
            let count = match self.rails[index].read() {
                Ok(count) => count,
                Err(why) => return self.lose_rail(index, &why, sink),
            };
            if let Err(why) = self.flushed_gpus.flush(|| self.rails[index].has_payload(count)) {
                return self.lose_rail(index, &why, sink);
            }
            for entry in 0..count {
                let completion = self.rails[index].entry(entry);
                if completion.wr_id == RequestId::RECEIVE {
                    self.received(index, &completion, sink);
                } else {
                    self.sent(index, &completion, sink);
                }
            }
            if count < BATCH {
                return;
            }
        }
    }

    /// Handles a send queue completion.
    #[inline(always)]
    fn sent(&mut self, index: usize, completion: &sys::Completion, sink: &mut Sink) {
        let id = RequestId::decode(completion.wr_id);
        let Some(peer) = self.peers.get_mut(id.peer) else { return };
        if peer.state != PeerState::Open {
            return;
        }
        let Some(pair) = peer.pair_on(index) else { return };
        if completion.status != sys::IBV_WC_SUCCESS {
            if pair.is_current(id) {
                fail(peer, (index, &self.rails[index]), completion, sink);
            }
            return;
        }
        match pair.completed(id) {
            Some(ChainUse::Part { token, is_bulk }) => {
                peer.bulk -= u32::from(is_bulk);
                sink.done(token);
            }
            Some(ChainUse::Control) | None => {}
        }
    }

    /// Handles an arrival.
    #[inline(always)]
    fn received(&mut self, index: usize, completion: &sys::Completion, sink: &mut Sink) {
        let rail = &mut self.rails[index];
        rail.renew_receive();
        if completion.status != sys::IBV_WC_SUCCESS {
            let why = rail.library().status(completion.status);
            log::warn!("{}: a receive failed: {why}; posted again", rail.nic.name());
            return;
        }
        let sender = rail.peer_of(completion.qp_num);
        let peer = sender.and_then(|sender| self.peers.get_mut(sender));
        let Some(peer) = peer.filter(|peer| peer.state != PeerState::Fenced) else { return };
        let local = peer.local;
        let Some(pair) = peer.pair_on(index) else { return };
        let (lane, rider) = pair.received.lanes(u32::from_be(completion.imm_data));
        let is_control = local.contains(lane);
        if rider.is_none() && !is_control {
            pair.received.enter(lane);
        }
        let mut raise = |lane: Lane| {
            // Dropped and counted if the lane is granted to another peer.
            if self.group.lanes.arrive_from_in_poll(peer.rank, lane).is_some() {
                sink.lane_raised(lane.id());
            }
        };
        rider.into_iter().for_each(&mut raise);
        raise(lane);
        let rank = peer.rank.0;
        if is_control {
            if peer.is_leaving(&self.group.lanes) {
                self.departures.add(peer.rank);
            }
        } else if peer.incoming.consume() {
            peer.reports_due += 1;
            if !self.reports_due.contains(&rank) {
                self.reports_due.push(rank);
            }
        }
    }

    /// Sends due consumption reports.
    #[cold]
    pub(super) fn report(&mut self, sink: &mut Sink) {
        for rank in std::mem::take(&mut self.reports_due) {
            let Some(peer) = self.peers.get_mut(Rank(rank)) else { continue };
            while peer.reports_due > 0 && peer.state == PeerState::Open {
                peer.reports_due -= 1;
                if let Some(lane) = peer.remote.map(|remote| remote.consumed) {
                    self.template.signal(peer, lane, sink);
                }
            }
        }
    }

    /// Reads asynchronous events: each is named in the log; a failed queue pair loses one peer, a failed
    /// device all peers on it.
    #[cold]
    pub(super) fn read_events(&mut self, sink: &mut Sink) {
        self.polls_left = POLLS_PER_EVENT;
        for index in 0..self.rails.len() {
            while let Some(event) = self.rails[index].next_event() {
                self.handle_event(index, event, sink);
            }
        }
    }

    fn handle_event(&mut self, index: usize, event: AsyncEvent, sink: &mut Sink) {
        let rail = &self.rails[index];
        let (name, kind) = (rail.nic.name(), rail.library().event(event.kind));
        let peer = event.pair.and_then(|number| rail.peer_of(number));
        match (event.kind, peer) {
            (sys::IBV_EVENT_QP_LAST_WQE_REACHED, _) => {}
            (_, Some(peer)) => {
                if let Some(peer) = self.peers.get_mut(peer) {
                    report_lost(peer, format!("{name}: its queue pair failed: {kind}"), sink);
                }
            }
            (
                sys::IBV_EVENT_CQ_ERR | sys::IBV_EVENT_SRQ_ERR | sys::IBV_EVENT_DEVICE_FATAL,
                None,
            ) => {
                self.lose_rail(index, &kind, sink);
            }
            (sys::IBV_EVENT_PORT_ERR, None) => match event.port {
                Some(port) if port != self.rails[index].nic.port => {}
                _ => log::warn!("{name}: {kind}; writes wait until it is active again"),
            },
            (_, None) => log::info!("{name}: {kind}"),
        }
    }

    /// Reports all peers on a failed NIC as lost.
    #[cold]
    fn lose_rail(&mut self, index: usize, why: &str, sink: &mut Sink) {
        let why = format!("{}: {why}", self.rails[index].nic.name());
        for peer in self.peers.values_mut() {
            if peer.pair_on(index).is_some() {
                report_lost(peer, why.clone(), sink);
            }
        }
    }
}

/// Handles the first error on a queue pair, which is in an error state then: the parts on it wait for the
/// fence, since the control plane may report an orderly leave. Requests that it flushes name no other
/// cause.
#[cold]
fn fail(
    peer: &mut VerbsPeer,
    (index, rail): (usize, &Rail),
    completion: &sys::Completion,
    sink: &mut Sink,
) {
    let status = rail.library().status(completion.status);
    let (name, number) = (rail.nic.name(), completion.qp_num);
    let chain = peer.pair_on(index).and_then(|pair| pair.oldest());
    let of = match chain.map(|chain| (chain.chain_use, chain.length)) {
        Some((ChainUse::Part { .. }, 1)) => "a part of one work request".into(),
        Some((ChainUse::Part { .. }, length)) => format!("a part of {length} work requests"),
        Some((ChainUse::Control, _)) | None => "a control message".into(),
    };
    let why = format!(
        "{name}: an RDMA write of queue pair {number}, in {of}, failed: {status} (vendor code {:#x})",
        completion.vendor_err
    );
    report_lost(peer, why, sink);
}

impl Drop for VerbsLink {
    /// Delivers posted parts before the link closes and destroys the queue pairs.
    fn drop(&mut self) {
        let mut sink = Sink::default();
        let deadline = clock::now().after(LINGER);
        let lanes = self.group.lanes.clone();
        let is_here = |peer: &&VerbsPeer| {
            peer.state == PeerState::Open && peer.is_connected(&lanes) && !peer.is_leaving(&lanes)
        };
        let here: Vec<Rank> = self.peers.values().filter(is_here).map(|peer| peer.rank).collect();
        here.into_iter().for_each(|peer| self.signal_presence(peer, &mut sink));
        loop {
            self.poll(clock::now(), &mut sink);
            let is_waiting = self.peers.values().filter(is_here).any(VerbsPeer::has_in_flight);
            if !is_waiting || clock::now() >= deadline {
                return;
            }
            std::thread::yield_now();
        }
    }
}
