//! Events of a link's queues: arrivals, ends of parts, losses, and the end of the link itself.

use super::super::peer::{Peer, State};
use super::super::rail::{Rail, Use};
use super::super::wire::{immediate, lanes_of};
use super::OfiLink;
use crate::clock;
use crate::link::{Link, Membership, Sink};
use crate::types::{Lane, Time};
use std::time::Duration;
use weft_control::Rank;

/// How long a link that is dropped waits for what it has sent to be delivered.
const LINGER: Duration = Duration::from_secs(1);
/// After a peer's farewell: how long what it sent before may still be on its way.
pub const LAST_WORDS: Duration = Duration::from_millis(250);

impl OfiLink {
    /// Sends the reports of consumption that are due, as far as the provider takes them.
    #[cold]
    pub(super) fn report(&mut self, sink: &mut Sink) {
        let OfiLink { due, peers, rails, .. } = self;
        due.retain(|&rank| {
            let Some(Some(peer)) = peers.get_mut(rank as usize) else { return false };
            while peer.due > 0 && peer.state == State::Open {
                let immediate = immediate(peer.theirs.consumed, None);
                let used = Use::Own { peer: rank };
                match rails[0].signal(peer.ends[0], immediate, 0, used) {
                    Ok(true) => {
                        peer.due -= 1;
                        peer.own += 1;
                    }
                    Ok(false) => return true,
                    Err(error) => lose(peer, rails[0].describe(error), sink),
                }
            }
            false
        });
    }

    /// Raises the lanes of an arrival, and counts it as consumed.
    #[inline]
    pub(super) fn arrived(
        group: &Membership,
        peers: &mut [Option<Peer>],
        (due, leaving): (&mut Vec<u32>, &mut Vec<(u32, Option<Time>)>),
        immediate: u64,
        sender: Option<Rank>,
        sink: &mut Sink,
    ) {
        let mut raise = |lane: Lane| {
            let holder = match sender {
                None => group.lanes.arrive_unmarked(lane),
                Some(sender) => group.lanes.arrive_from_unmarked(sender, lane),
            };
            if holder.is_some() {
                sink.rose(lane.id());
            }
            holder
        };
        let (lane, rider) = lanes_of(immediate);
        if let Some(rider) = rider {
            raise(rider);
        }
        // An arrival that is dropped has taken a place in the queue, too.
        let holder = raise(lane).or(sender).or_else(|| group.lanes.last_holder(lane));
        let peer = holder.and_then(|holder| peers.get_mut(holder.index())?.as_mut());
        let Some(peer) = peer else { return };
        let rank = peer.rank.0;
        if peer.is_report(lane) {
            if peer.is_leaving(&group.lanes) && !leaving.iter().any(|(known, _)| *known == rank) {
                leaving.push((rank, None));
            }
        } else if peer.incoming.consume() {
            peer.due += 1;
            if !due.contains(&rank) {
                due.push(rank);
            }
        }
    }

    /// Reports the loss of peers that have left, once all that they sent has had time to arrive: nothing
    /// sent to them ends any more.
    #[cold]
    pub(super) fn take_leave(&mut self, now: Time, sink: &mut Sink) {
        let peers = &mut self.peers;
        self.leaving.retain_mut(|(rank, since)| {
            let since = *since.get_or_insert(now);
            let is_over = now.since(since) >= LAST_WORDS;
            if is_over && let Some(Some(peer)) = peers.get_mut(*rank as usize) {
                lose(peer, "it has left".into(), sink);
            }
            !is_over
        });
    }

    pub(super) fn ended(peers: &mut [Option<Peer>], used: Use, sink: &mut Sink) {
        match used {
            Use::Part { token, peer, is_bulk } => {
                if let Some(Some(peer)) = peers.get_mut(peer as usize) {
                    peer.parts -= 1;
                    peer.bulk -= u32::from(is_bulk);
                }
                sink.done(token);
            }
            Use::Own { peer } => {
                if let Some(Some(peer)) = peers.get_mut(peer as usize) {
                    peer.own -= 1;
                }
            }
            Use::Abandoned | Use::Receive | Use::Free => {}
        }
    }

    /// An operation has failed. If that is the end of the peer's connection, its parts wait for the fence:
    /// the control plane may report next that the peer has left in peace.
    #[cold]
    pub(super) fn failed(
        peers: &mut [Option<Peer>],
        used: Use,
        error: i32,
        why: String,
        sink: &mut Sink,
    ) {
        let (token, peer, is_bulk) = match used {
            Use::Part { token, peer, is_bulk } => (Some(token), peer, is_bulk),
            Use::Own { peer } => (None, peer, false),
            Use::Abandoned | Use::Receive | Use::Free => return,
        };
        let Some(Some(peer)) = peers.get_mut(peer as usize) else { return };
        peer.bulk -= u32::from(is_bulk);
        peer.parts -= u32::from(token.is_some());
        peer.own -= u32::from(token.is_none());
        if !is_loss(error) && peer.state != State::Lost {
            match token {
                Some(token) => sink.failed(token, why),
                None => lose(peer, why, sink),
            }
            return;
        }
        peer.stuck.extend(token);
        lose(peer, why, sink);
    }

    /// Closes the endpoints once no peer is left.
    pub(super) fn close_if_alone(&mut self) {
        if self.open == 0 {
            self.rails.iter_mut().for_each(Rail::close);
            self.kept.clear();
        }
    }
}

/// Reports a peer as lost, once.
#[cold]
pub fn lose(peer: &mut Peer, why: String, sink: &mut Sink) {
    if peer.state == State::Open {
        peer.state = State::Lost;
        sink.lost.push((peer.rank, why));
    }
}

/// Errors that end a connection; others are of one write.
pub fn is_loss(error: i32) -> bool {
    [
        libc::ECONNRESET,
        libc::ECONNREFUSED,
        libc::ECONNABORTED,
        libc::EPIPE,
        libc::ENOTCONN,
        libc::ETIMEDOUT,
        libc::EHOSTUNREACH,
        libc::EHOSTDOWN,
        libc::ENETUNREACH,
        libc::ENETDOWN,
        libc::ESHUTDOWN,
        libc::ECANCELED,
        libc::EIO,
    ]
    .contains(&error)
}

impl Drop for OfiLink {
    /// What was posted shall arrive although its sender leaves: a provider may keep it until it is polled.
    fn drop(&mut self) {
        let mut sink = Sink::default();
        let deadline = clock::now().after(LINGER);
        let lanes = self.group.lanes.clone();
        let is_here = |peer: &&Peer| {
            peer.state == State::Open && peer.is_connected(&lanes) && !peer.is_leaving(&lanes)
        };
        let mut to_leave: Vec<Rank> =
            self.peers.iter().flatten().filter(is_here).map(|peer| peer.rank).collect();
        loop {
            to_leave.retain(|&peer| !self.signal_presence(peer, self.farewell, &mut sink));
            self.poll(clock::now(), &mut sink);
            let mut here = self.peers.iter().flatten().filter(is_here);
            let is_waiting = here.any(|peer| peer.own + peer.parts > 0) || !to_leave.is_empty();
            if !is_waiting || clock::now() >= deadline {
                return;
            }
            std::thread::yield_now();
        }
    }
}
