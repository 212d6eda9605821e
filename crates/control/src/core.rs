//! The state of a rank and its protocol, without sockets, threads or a clock.
//!
//! The mesh thread puts in what arrived ([`Core::receive`], [`Core::link_down`]), the handle puts in
//! what the program asks for; out come frames to send and callbacks to run.
//!
//! `gather` has the collective calls, `mail` the point-to-point messages, `poison` the end of a group
//! and its callbacks, `reform` the agreement on the survivors.

mod gather;
mod mail;
mod poison;
mod reform;

use crate::agreement::{Agreement, View};
use crate::message::Message;
use crate::wire::Malformed;
use crate::{Cause, Error, Member, PeerStatus, Poison, Rank, Result};
pub(crate) use gather::Payload;
use gather::{Call, Part};
use mail::Mail;
pub(crate) use reform::Formed;
use reform::Phase;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// How many generations a peer may be ahead.
const MAX_GENERATIONS_AHEAD: u32 = 64;

pub(crate) type OnPoison = Box<dyn Fn(&Poison) + Send + Sync>;
pub(crate) type OnLeft = Arc<dyn Fn(Rank) + Send + Sync>;

/// Something for the mesh thread to do.
pub(crate) enum Action {
    /// Send a frame to the peer with this original rank.
    Send(Rank, Arc<[u8]>),
    /// Send what is queued, then close.
    Close(Rank),
    /// Call these.
    Poisoned(Vec<OnPoison>, Poison),
    /// Call these.
    Left(Vec<OnLeft>, Rank),
}

/// A rank's state. All ranks in it are original ones unless it says otherwise.
pub(crate) struct Core {
    me: Rank,
    peers: BTreeMap<Rank, Peer>,
    groups: BTreeMap<u32, Group>,
    /// The newest generation this rank is a member of.
    newest: u32,
    /// The highest generation this rank ever proposed.
    proposed: u32,
    agreement: Option<Agreement>,
    phase: Phase,
    /// The newest group was formed here, and not every member has confirmed it.
    unconfirmed: bool,
    /// Alive while the program has a handle of the newest group.
    held: Weak<()>,
    /// The last view of each peer.
    views: BTreeMap<Rank, View>,
    /// The first peer that said it goes on without this rank.
    excluded_by: Option<Rank>,
    pub(crate) actions: Vec<Action>,
    /// The answer to a ping: sent, answered, received.
    pub(crate) pong: Option<(u64, u64, u64)>,
    /// Set once the mesh thread is done.
    pub(crate) closed: bool,
    pub(crate) leaving: bool,
}

struct Peer {
    status: PeerStatus,
    /// Bytes of collective calls that it sent before this rank made the same calls.
    ahead: usize,
    /// Bytes of point-to-point messages that it sent and this rank has not received.
    queued: usize,
}

impl Peer {
    const NEW: Peer = Peer { status: PeerStatus::Alive, ahead: 0, queued: 0 };
}

/// One generation. Peers may speak of it before this rank knows that it is a member.
#[derive(Default)]
struct Group {
    members: Arc<[Member]>,
    poison: Option<Poison>,
    on_poison: Vec<OnPoison>,
    on_left: Vec<OnLeft>,
    next_sequence: u64,
    /// The parts of collective calls, by sequence and sender.
    gathers: BTreeMap<u64, BTreeMap<Rank, Part>>,
    /// The collective calls that this rank has begun and not ended, by sequence.
    calls: BTreeMap<u64, Call>,
    mail: Mail,
}

impl Group {
    /// The rank in this group of a peer known by its original one.
    fn rank_of(&self, original: Rank) -> Option<Rank> {
        self.members.iter().find(|m| m.original_rank == original).map(|m| m.rank)
    }
}

/// How a connection ended, or why it must.
#[derive(Clone, Debug)]
pub(crate) enum Down {
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
            agreement: None,
            phase: Phase::Idle,
            unconfirmed: false,
            held: Weak::new(),
            views: BTreeMap::new(),
            excluded_by: None,
            actions: Vec::new(),
            pong: None,
            closed: false,
            leaving: false,
        }
    }

    /// What the handles of the first generation keep.
    pub(crate) fn first_handle(&mut self) -> Arc<()> {
        let handle = Arc::new(());
        self.held = Arc::downgrade(&handle);
        handle
    }

    pub(crate) fn status(&self, peer: Rank) -> PeerStatus {
        self.peers.get(&peer).map_or(PeerStatus::Alive, |peer| peer.status)
    }

    /// Takes in a message. An error costs the peer its connection.
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
                return self.gathered(from, generation, sequence, Part { operation, payload });
            }
            Message::Mail { generation, channel, payload } => {
                return self.mailed(from, generation, channel, payload);
            }
            Message::Taken { generation, bytes } => return self.taken(from, generation, bytes),
            Message::Poison { generation, poison } => {
                self.known_generation(generation)?;
                self.poison(generation, poison);
            }
            Message::Leave => self.left(from),
            Message::View(view) => {
                self.known_generation(view.generation)?;
                self.viewed(from, view);
            }
            Message::Ping(sent) => self.send(from, &Message::Pong { sent, answered: clock }),
            Message::Pong { sent, answered } => self.pong = Some((sent, answered, clock)),
            Message::Waiting(_) | Message::Roster(_) => {
                return Err(Malformed("a message of the start came later"));
            }
        }
        Ok(())
    }

    /// A connection is gone, or is to be given up.
    pub(crate) fn link_down(&mut self, peer: Rank, how: Down) {
        let Some(state) = self.peers.get_mut(&peer) else { return };
        if state.status != PeerStatus::Alive {
            return;
        }
        state.status = PeerStatus::Lost;
        let silent = matches!(how, Down::Silent(_));
        let (kind, detail) = match how {
            Down::Closed(detail) => (Cause::Lost, detail),
            Down::Silent(detail) => (Cause::Silent, detail),
            Down::Protocol(detail) => (Cause::Protocol, detail),
        };
        self.gone(peer);
        if self.leaving {
            return;
        }
        let rank = self.groups.get(&self.newest).and_then(|group| group.rank_of(peer));
        if rank.is_some() {
            self.poison(self.newest, Poison { kind, rank, detail });
        }
        if silent {
            self.dismiss(peer);
        }
    }

    /// Tells a silent peer, should it ever listen again, that the others go on without it.
    fn dismiss(&mut self, peer: Rank) {
        let generation = self.newest;
        if let Some(poison) = self.poisoned(generation) {
            self.send(peer, &Message::Poison { generation, poison });
        }
        let alive = self.peers.iter().filter(|(_, peer)| peer.status == PeerStatus::Alive);
        let members = alive.map(|(rank, _)| *rank).chain([self.me]).collect();
        self.send(peer, &Message::View(View { generation: generation + 1, members }));
        self.actions.push(Action::Close(peer));
    }

    fn left(&mut self, peer: Rank) {
        let Some(state) = self.peers.get_mut(&peer) else { return };
        if state.status != PeerStatus::Alive {
            return;
        }
        state.status = PeerStatus::Left;
        self.actions.push(Action::Close(peer));
        self.gone(peer);
        if let Some(group) = self.groups.get(&self.newest)
            && let Some(rank) = group.rank_of(peer)
        {
            self.actions.push(Action::Left(group.on_left.clone(), rank));
        }
    }

    fn gone(&mut self, peer: Rank) {
        if let Some(agreement) = &mut self.agreement {
            agreement.lost(peer);
        }
        self.advance_agreement();
    }

    // Leaving.

    pub(crate) fn leave(&mut self) {
        if !self.leaving {
            self.leaving = true;
            self.broadcast(&Message::Leave);
        }
    }

    // Helpers.

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

    /// An error unless the generation is usable and all of its members are here.
    pub(crate) fn check(&self, generation: u32, operation: &'static str) -> Result<()> {
        self.usable(generation)?;
        let members = self.groups.get(&generation).map(|group| &*group.members).unwrap_or_default();
        let gone = members.iter().find(|m| self.status(m.original_rank) != PeerStatus::Alive);
        gone.map_or(Ok(()), |member| Err(Error::Left { rank: member.rank, operation }))
    }

    fn known_generation(&self, generation: u32) -> std::result::Result<(), Malformed> {
        let newest = self.newest.max(self.proposed).saturating_add(MAX_GENERATIONS_AHEAD);
        if generation > newest { Err(Malformed("a generation out of nowhere")) } else { Ok(()) }
    }

    /// Asks a peer for its clock. The answer will be in [`Core::pong`].
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
mod tests {
    //! What the tests of the parts have in common.

    use super::*;

    pub(super) fn member(rank: u32) -> Member {
        Member {
            rank: Rank(rank),
            original_rank: Rank(rank),
            host_id: "h".into(),
            pid: rank,
            local_index: 0,
            address: [127, 0, 0, 1].into(),
        }
    }

    /// The messages for one peer that wait to be sent, which are taken away.
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
