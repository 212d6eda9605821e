//! What a rank knows and says, without sockets, threads or a clock.
//!
//! The mesh thread puts in what arrived ([`Core::receive`], [`Core::link_down`]), the handle puts in
//! what the program asks for; out come frames to send and news to pass on.

use crate::agreement::{Agreement, Outcome, View};
use crate::message::Message;
use crate::wire::{MAX_PAYLOAD, Malformed};
use crate::{Cause, Error, Member, PeerStatus, Poison, Rank, Result, member};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How many bytes a peer may send ahead of this rank's own calls.
const MAX_AHEAD: usize = 4 * MAX_PAYLOAD;
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
    /// Bytes it sent that no call has asked for yet.
    ahead: usize,
}

/// One generation. Peers may speak of it before this rank knows that it is a member.
#[derive(Default)]
struct Group {
    members: Arc<[Member]>,
    poison: Option<Poison>,
    on_poison: Vec<OnPoison>,
    on_left: Vec<OnLeft>,
    next_sequence: u64,
    /// The parts of all-gathers, by sequence and sender.
    gathers: BTreeMap<u64, BTreeMap<Rank, Vec<u8>>>,
    /// Those that a call waits for.
    awaited: BTreeSet<u64>,
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
        let alive = || Peer { status: PeerStatus::Alive, ahead: 0 };
        let others = members.iter().map(|m| m.original_rank).filter(|rank| *rank != me);
        let peers = others.map(|rank| (rank, alive())).collect();
        let group = Group { members: members.into(), ..Group::default() };
        Core {
            me,
            peers,
            groups: BTreeMap::from([(0, group)]),
            newest: 0,
            proposed: 0,
            agreement: None,
            views: BTreeMap::new(),
            excluded_by: None,
            actions: Vec::new(),
            pong: None,
            closed: false,
            leaving: false,
        }
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
            Message::Gather { generation, sequence, payload } => {
                return self.gathered(from, generation, sequence, payload);
            }
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

    // Poison.

    /// Poisons a generation, unless something was before. The first to know tells everybody.
    pub(crate) fn poison(&mut self, generation: u32, poison: Poison) {
        let group = self.groups.entry(generation).or_default();
        if group.poison.is_some() {
            return;
        }
        log::info!("generation {generation} is poisoned: {poison}");
        group.poison = Some(poison.clone());
        self.actions.push(Action::Poisoned(std::mem::take(&mut group.on_poison), poison.clone()));
        self.broadcast(&Message::Poison { generation, poison });
    }

    pub(crate) fn poisoned(&self, generation: u32) -> Option<Poison> {
        self.groups.get(&generation).and_then(|group| group.poison.clone())
    }

    /// Registers a callback, or gives it back with the poison that is there already.
    pub(crate) fn on_poison(
        &mut self,
        generation: u32,
        call: OnPoison,
    ) -> Option<(OnPoison, Poison)> {
        let group = self.groups.entry(generation).or_default();
        match &group.poison {
            Some(poison) => Some((call, poison.clone())),
            None => {
                group.on_poison.push(call);
                None
            }
        }
    }

    /// Registers a callback, and says who has left already.
    pub(crate) fn on_left(&mut self, generation: u32, call: OnLeft) -> Vec<Rank> {
        let group = self.groups.entry(generation).or_default();
        group.on_left.push(call);
        let left = |m: &&Member| {
            self.peers.get(&m.original_rank).is_some_and(|p| p.status == PeerStatus::Left)
        };
        group.members.iter().filter(left).map(|m| m.rank).collect()
    }

    // All-gather.

    /// Starts an all-gather and says which one it is.
    pub(crate) fn gather(&mut self, generation: u32, payload: &[u8]) -> Result<u64> {
        self.usable(generation)?;
        let me = self.me;
        let group = self.groups.entry(generation).or_default();
        let sequence = group.next_sequence;
        group.next_sequence += 1;
        group.awaited.insert(sequence);
        let parts = group.gathers.entry(sequence).or_default();
        for (sender, part) in parts.iter() {
            if let Some(peer) = self.peers.get_mut(sender) {
                peer.ahead = peer.ahead.saturating_sub(weight(part));
            }
        }
        parts.insert(me, payload.to_vec());
        let payload = payload.to_vec();
        self.broadcast(&Message::Gather { generation, sequence, payload });
        Ok(sequence)
    }

    /// Whether an all-gather is done, and if so how.
    pub(crate) fn gather_done(
        &mut self,
        generation: u32,
        sequence: u64,
        operation: &'static str,
    ) -> Option<Result<Vec<Vec<u8>>>> {
        let missing = self.gather_missing(generation, sequence);
        let group = self.groups.get_mut(&generation)?;
        if missing.is_empty() {
            let mut parts = group.gathers.remove(&sequence)?;
            group.awaited.remove(&sequence);
            let in_order = group.members.iter().filter_map(|m| parts.remove(&m.original_rank));
            return Some(Ok(in_order.collect()));
        }
        let left = missing.iter().find(|rank| {
            let member = group.members.get(rank.index());
            member.is_some_and(|m| {
                self.peers.get(&m.original_rank).is_some_and(|p| p.status == PeerStatus::Left)
            })
        });
        let error = match (&group.poison, left) {
            (Some(poison), _) => Error::Poisoned(poison.clone()),
            (None, Some(rank)) => Error::Left { rank: *rank, operation },
            (None, None) if self.closed || self.leaving => Error::Closed,
            (None, None) => return None,
        };
        Some(Err(error))
    }

    /// The ranks, in that generation, whose part has not come.
    pub(crate) fn gather_missing(&self, generation: u32, sequence: u64) -> Vec<Rank> {
        let Some(group) = self.groups.get(&generation) else { return Vec::new() };
        let parts = group.gathers.get(&sequence);
        let here = |m: &Member| parts.is_some_and(|parts| parts.contains_key(&m.original_rank));
        group.members.iter().filter(|m| !here(m)).map(|m| m.rank).collect()
    }

    /// Gives an all-gather up. What still comes for it is dropped.
    pub(crate) fn gather_abandon(&mut self, generation: u32, sequence: u64) {
        if let Some(group) = self.groups.get_mut(&generation) {
            group.gathers.remove(&sequence);
            group.awaited.remove(&sequence);
        }
    }

    fn gathered(
        &mut self,
        from: Rank,
        generation: u32,
        sequence: u64,
        payload: Vec<u8>,
    ) -> std::result::Result<(), Malformed> {
        self.known_generation(generation)?;
        if generation < self.newest {
            return Ok(());
        }
        let group = self.groups.entry(generation).or_default();
        if sequence < group.next_sequence && !group.awaited.contains(&sequence) {
            return Ok(());
        }
        if sequence >= group.next_sequence
            && let Some(peer) = self.peers.get_mut(&from)
        {
            peer.ahead += weight(&payload);
            if peer.ahead > MAX_AHEAD {
                return Err(Malformed("it is too far ahead of this rank's own calls"));
            }
        }
        if group.gathers.entry(sequence).or_default().insert(from, payload).is_some() {
            return Err(Malformed("it sent the same part of an all-gather twice"));
        }
        Ok(())
    }

    // The agreement on the survivors.

    /// Starts to form a new group out of whoever is left.
    pub(crate) fn reform(&mut self, generation: u32) -> Result<()> {
        if self.closed || self.leaving {
            return Err(Error::Closed);
        }
        if generation != self.newest || self.agreement.is_some() {
            return Err(Error::Superseded);
        }
        if let Some(by) = self.excluded_by {
            return Err(Error::Excluded { by });
        }
        let group = self.groups.entry(generation).or_default();
        let members = group.members.clone();
        let rank = group.rank_of(self.me);
        let detail = "it began to form a new group".to_string();
        self.poison(generation, Poison { kind: Cause::User, rank, detail });
        let alive = members
            .iter()
            .map(|m| m.original_rank)
            .filter(|rank| self.status(*rank) == PeerStatus::Alive)
            .collect();
        let proposal = generation.max(self.proposed) + 1;
        let mut agreement = Agreement::new(self.me, alive, proposal);
        for (peer, view) in &self.views {
            if view.generation > generation {
                agreement.receive(*peer, view.clone());
            }
        }
        self.agreement = Some(agreement);
        self.advance_agreement();
        Ok(())
    }

    /// Where the agreement stands. Once it is agreed, the new group is there.
    pub(crate) fn reform_outcome(&mut self) -> Option<Result<View>> {
        match self.agreement.as_ref()?.outcome() {
            _ if self.closed || self.leaving => Some(Err(Error::Closed)),
            Outcome::Agreed(view) => Some(Ok(view)),
            Outcome::Excluded(by) => Some(Err(Error::Excluded { by })),
            Outcome::Pending(_) => self.excluded_by.map(|by| Err(Error::Excluded { by })),
        }
    }

    /// Who has not agreed yet, by ranks of the old generation.
    pub(crate) fn reform_missing(&self, generation: u32) -> Vec<Rank> {
        let (Some(agreement), Some(group)) = (&self.agreement, self.groups.get(&generation)) else {
            return Vec::new();
        };
        match agreement.outcome() {
            Outcome::Pending(missing) => {
                missing.into_iter().filter_map(|rank| group.rank_of(rank)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Ends this rank's part in an agreement that came to nothing, and says so: a proposal that
    /// nobody stands behind must not be agreed to later.
    pub(crate) fn reform_abandon(&mut self) {
        if let Some(agreement) = self.agreement.take() {
            let view = View { generation: agreement.generation(), members: BTreeSet::new() };
            self.broadcast(&Message::View(view));
        }
    }

    /// Makes what was agreed the newest group and parts from everybody else.
    pub(crate) fn form(&mut self, view: &View) -> Arc<[Member]> {
        let old = self.groups.get(&self.newest).map(|group| group.members.clone());
        let survivors = old.iter().flat_map(|members| members.iter());
        let survivors = survivors.filter(|m| view.members.contains(&m.original_rank)).cloned();
        let members: Arc<[Member]> = member::number(survivors).into();
        for (rank, peer) in &mut self.peers {
            if !view.members.contains(rank) && peer.status == PeerStatus::Alive {
                peer.status = PeerStatus::Lost;
                self.actions.push(Action::Close(*rank));
            }
        }
        self.groups.retain(|generation, _| *generation >= self.newest);
        self.groups.entry(view.generation).or_default().members = members.clone();
        self.newest = view.generation;
        self.agreement = None;
        members
    }

    fn viewed(&mut self, from: Rank, view: View) {
        if !view.members.is_empty() && !view.members.contains(&self.me) {
            self.excluded_by.get_or_insert(from);
        }
        if view.members.is_empty() {
            self.views.remove(&from);
        } else {
            self.views.insert(from, view.clone());
        }
        if let Some(agreement) = &mut self.agreement {
            agreement.receive(from, view);
            self.advance_agreement();
            return;
        }
        let Some(group) = self.groups.get(&self.newest) else { return };
        let (Some(rank), false) = (group.rank_of(from), view.generation < self.newest) else {
            return;
        };
        let same = group.members.iter().map(|m| m.original_rank).eq(view.members.iter().copied());
        if view.generation == self.newest && same {
            return;
        }
        // It agrees with others on another group, so it is no longer with this one.
        let detail = "it forms a new group".to_string();
        self.poison(self.newest, Poison { kind: Cause::Lost, rank: Some(rank), detail });
    }

    fn advance_agreement(&mut self) {
        let Some(agreement) = &mut self.agreement else { return };
        self.proposed = agreement.generation();
        if let Some(view) = agreement.announcement() {
            self.broadcast(&Message::View(view));
        }
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

/// What a stored part costs.
fn weight(part: &[u8]) -> usize {
    part.len() + 64
}
