//! A rank's protocol state, without sockets, threads or a clock.
//!
//! The mesh thread passes in messages and losses ([`Core::receive`], [`Core::connection_lost`]), the handle
//! passes in program calls; the results are frames to send and callbacks to run.
//!
//! - `gather`, `call`: collective calls, and one call's state
//! - `point_to_point`, `message_queues`: messages between two ranks, with flow control, and queues
//! - `poison`: group failure and callbacks
//! - `reform`, `reform_phase`: the next group, formed by the survivors; call progress

mod call;
mod gather;
mod message_queues;
mod point_to_point;
mod poison;
mod reform;
mod reform_phase;

use crate::message::Message;
use crate::view_change::{View, ViewChange};
use crate::wire::Malformed;
use crate::{Cause, Error, Member, PeerStatus, Poison, Rank, Result};
use call::{CallPart, PendingCall};
use message_queues::MessageQueues;
use reform_phase::ReformPhase;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

pub(crate) use call::Payload;
pub(crate) use reform_phase::FormedGroup;

/// Generations that a peer may be ahead of this rank.
const MAX_GENERATIONS_AHEAD: u32 = 64;

pub(crate) type PoisonCallback = Box<dyn Fn(&Poison) + Send + Sync>;
pub(crate) type PeerLeftCallback = Arc<dyn Fn(Rank) + Send + Sync>;

/// Request to the mesh thread.
pub(crate) enum Action {
    /// Send a frame to the peer with this original rank.
    Send(Rank, Arc<[u8]>),
    /// Send queued frames, then close.
    Close(Rank),
    /// Run the poison callbacks.
    Poisoned(Vec<PoisonCallback>, Poison),
    /// Run the callbacks for a departed rank.
    Left(Vec<PeerLeftCallback>, Rank),
}

/// A rank's state. Ranks are original ones unless noted otherwise.
pub(crate) struct Core {
    me: Rank,
    peers: BTreeMap<Rank, Peer>,
    groups: BTreeMap<u32, Group>,
    /// Newest generation with this rank as a member.
    newest: u32,
    /// Highest generation that this rank has proposed.
    proposed: u32,
    view_change: Option<ViewChange>,
    phase: ReformPhase,
    /// The newest group is formed here and not yet confirmed by all members.
    unconfirmed: bool,
    /// Upgradable while the program has a handle to the newest group.
    handle: Weak<()>,
    /// Last view from each peer.
    views: BTreeMap<Rank, View>,
    /// First peer whose view excludes this rank.
    excluded_by: Option<Rank>,
    pub(crate) actions: Vec<Action>,
    /// Response to a ping: times sent, responded, received.
    pub(crate) pong: Option<(u64, u64, u64)>,
    /// True once the mesh thread has ended.
    pub(crate) closed: bool,
    pub(crate) leaving: bool,
}

struct Peer {
    status: PeerStatus,
    /// Stored bytes in its parts for collective calls that this rank has not begun.
    ahead: usize,
    /// Stored bytes in its point-to-point messages that the program has not received.
    queued: usize,
}

impl Peer {
    const NEW: Peer = Peer { status: PeerStatus::Alive, ahead: 0, queued: 0 };
}

/// One generation. Its messages may arrive before this rank has formed it.
#[derive(Default)]
struct Group {
    members: Arc<[Member]>,
    poison: Option<Poison>,
    on_poison: Vec<PoisonCallback>,
    on_left: Vec<PeerLeftCallback>,
    next_sequence: u64,
    /// Collective call parts, by sequence and sender.
    gathers: BTreeMap<u64, BTreeMap<Rank, CallPart>>,
    /// Collective calls that this rank has begun and not finished, by sequence.
    calls: BTreeMap<u64, PendingCall>,
    messages: MessageQueues,
}

impl Group {
    /// Rank in this group for an original rank.
    fn rank_of(&self, original: Rank) -> Option<Rank> {
        self.members.iter().find(|m| m.original_rank == original).map(|m| m.rank)
    }
}

/// Connection loss cause.
#[derive(Clone, Debug)]
pub(crate) enum ConnectionLoss {
    Closed(String),
    Silent(String),
    Protocol(String),
}

impl Core {
    pub(crate) fn new(me: Rank, members: Vec<Member>) -> Core {
        let others = members.iter().map(|m| m.original_rank).filter(|rank| *rank != me);
        let peers = others.map(|rank| (rank, Peer::NEW)).collect();
        let group = Group { members: members.into(), ..Group::default() };
        Core {
            me,
            peers,
            groups: BTreeMap::from([(0, group)]),
            newest: 0,
            proposed: 0,
            view_change: None,
            phase: ReformPhase::Idle,
            unconfirmed: false,
            handle: Weak::new(),
            views: BTreeMap::new(),
            excluded_by: None,
            actions: Vec::new(),
            pong: None,
            closed: false,
            leaving: false,
        }
    }

    /// Token held by the first generation's handles.
    pub(crate) fn first_handle(&mut self) -> Arc<()> {
        let handle = Arc::new(());
        self.handle = Arc::downgrade(&handle);
        handle
    }

    pub(crate) fn status(&self, peer: Rank) -> PeerStatus {
        self.peers.get(&peer).map_or(PeerStatus::Alive, |peer| peer.status)
    }

    /// Handles a message. An error closes the sender's connection.
    pub(crate) fn receive(
        &mut self,
        from: Rank,
        message: Message,
        clock: u64,
    ) -> std::result::Result<(), Malformed> {
        if self.status(from) != PeerStatus::Alive {
            return Ok(());
        }
        match message {
            Message::Heartbeat => {}
            Message::Gather { generation, sequence, operation, payload } => {
                return self.part_received(
                    from,
                    generation,
                    sequence,
                    CallPart { operation, payload },
                );
            }
            Message::PointToPoint { generation, channel, payload } => {
                return self.message_received(from, generation, channel, payload);
            }
            Message::Acknowledge { generation, bytes } => {
                return self.acknowledged(from, generation, bytes);
            }
            Message::Poison { generation, poison } => {
                self.known_generation(generation)?;
                self.poison(generation, poison);
            }
            Message::Leave => self.peer_left(from),
            Message::View(view) => {
                self.known_generation(view.generation)?;
                self.view_received(from, view);
            }
            Message::Ping(sent) => self.send(from, &Message::Pong { sent, responded: clock }),
            Message::Pong { sent, responded } => self.pong = Some((sent, responded, clock)),
            Message::Missing(_) | Message::Roster(_) => {
                return Err(Malformed("a rendezvous message after the rendezvous"));
            }
        }
        Ok(())
    }

    /// Handles a connection that was lost or must be closed.
    pub(crate) fn connection_lost(&mut self, peer: Rank, how: ConnectionLoss) {
        let Some(state) = self.peers.get_mut(&peer) else { return };
        if state.status != PeerStatus::Alive {
            return;
        }
        state.status = PeerStatus::Lost;
        let silent = matches!(how, ConnectionLoss::Silent(_));
        let (kind, detail) = match how {
            ConnectionLoss::Closed(detail) => (Cause::Lost, detail),
            ConnectionLoss::Silent(detail) => (Cause::Silent, detail),
            ConnectionLoss::Protocol(detail) => (Cause::Protocol, detail),
        };
        self.peer_gone(peer);
        if self.leaving {
            return;
        }
        let rank = self.groups.get(&self.newest).and_then(|group| group.rank_of(peer));
        if rank.is_some() {
            self.poison(self.newest, Poison { kind, rank, detail });
        }
        if silent {
            self.exclude_silent_peer(peer);
        }
    }

    /// Sends a silent peer the poison and a view without it, in case it resumes, and closes.
    fn exclude_silent_peer(&mut self, peer: Rank) {
        let generation = self.newest;
        if let Some(poison) = self.poisoned(generation) {
            self.send(peer, &Message::Poison { generation, poison });
        }
        let alive = self.peers.iter().filter(|(_, peer)| peer.status == PeerStatus::Alive);
        let members = alive.map(|(rank, _)| *rank).chain([self.me]).collect();
        self.send(peer, &Message::View(View { generation: generation + 1, members }));
        self.actions.push(Action::Close(peer));
    }

    fn peer_left(&mut self, peer: Rank) {
        let Some(state) = self.peers.get_mut(&peer) else { return };
        if state.status != PeerStatus::Alive {
            return;
        }
        state.status = PeerStatus::Left;
        self.actions.push(Action::Close(peer));
        self.peer_gone(peer);
        if let Some(group) = self.groups.get(&self.newest)
            && let Some(rank) = group.rank_of(peer)
        {
            self.actions.push(Action::Left(group.on_left.clone(), rank));
        }
    }

    fn peer_gone(&mut self, peer: Rank) {
        if let Some(view_change) = &mut self.view_change {
            view_change.lost(peer);
        }
        self.advance_view_change();
    }

    pub(crate) fn leave(&mut self) {
        if !self.leaving {
            self.leaving = true;
            self.broadcast(&Message::Leave);
        }
    }

    pub(crate) fn usable(&self, generation: u32) -> Result<()> {
        if self.closed || self.leaving {
            return Err(Error::Closed);
        }
        match self.poisoned(generation) {
            _ if generation != self.newest => Err(Error::Superseded),
            Some(poison) => Err(Error::Poisoned(poison)),
            None => Ok(()),
        }
    }

    /// Error unless the generation is usable and all members are alive.
    pub(crate) fn check(&self, generation: u32, operation: &'static str) -> Result<()> {
        self.usable(generation)?;
        let members = self.groups.get(&generation).map(|group| &*group.members).unwrap_or_default();
        let gone = members.iter().find(|m| self.status(m.original_rank) != PeerStatus::Alive);
        gone.map_or(Ok(()), |member| Err(Error::Left { rank: member.rank, operation }))
    }

    fn known_generation(&self, generation: u32) -> std::result::Result<(), Malformed> {
        let newest = self.newest.max(self.proposed).saturating_add(MAX_GENERATIONS_AHEAD);
        if generation > newest { Err(Malformed("a generation too far ahead")) } else { Ok(()) }
    }

    /// Pings a peer; the response appears in [`Core::pong`].
    pub(crate) fn ping(&mut self, peer: Rank, clock: u64) {
        self.pong = None;
        self.send(peer, &Message::Ping(clock));
    }

    fn send(&mut self, to: Rank, message: &Message) {
        self.actions.push(Action::Send(to, message.frame().into()));
    }

    fn broadcast(&mut self, message: &Message) {
        let frame: Arc<[u8]> = message.frame().into();
        let alive = self.peers.iter().filter(|(_, peer)| peer.status == PeerStatus::Alive);
        self.actions.extend(alive.map(|(rank, _)| Action::Send(*rank, frame.clone())));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    //! Test helpers for all parts.

    use super::*;

    pub(crate) fn member(rank: u32) -> Member {
        Member {
            rank: Rank(rank),
            original_rank: Rank(rank),
            host_id: "h".into(),
            pid: rank,
            local_index: 0,
            address: [127, 0, 0, 1].into(),
        }
    }

    /// Removes and returns the queued messages to one peer.
    pub(super) fn sent(core: &mut Core, to: Rank) -> Vec<Message> {
        let parse = |action: &Action| match action {
            Action::Send(peer, frame) if *peer == to => {
                Some(Message::parse(frame.get(4..).unwrap_or_default()).unwrap())
            }
            _ => None,
        };
        let messages = core.actions.iter().filter_map(parse).collect();
        core.actions.retain(|action| !matches!(action, Action::Send(peer, _) if *peer == to));
        messages
    }
}
