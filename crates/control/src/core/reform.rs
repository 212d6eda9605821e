//! The agreement on the survivors, and the group that they form.
//!
//! A call has rounds. In each the survivors agree on a view, form the group, and then meet in it
//! ([`Operation::Reform`]), so that a group is returned once all of its members have it. A loss before
//! that, however far each of them is, poisons the group and begins the next round.

use super::{Action, Core, Payload};
use crate::agreement::{Agreement, Outcome, View};
use crate::message::Message;
use crate::{Cause, Error, Member, Operation, PeerStatus, Poison, Rank, Result, member};
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

/// How far a call of `reform` is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// No call is under way.
    #[default]
    Idle,
    /// The survivors agree on who is left.
    Agreeing,
    /// The group is formed here; its members wait for each other in this collective call.
    Confirming(u64),
}

/// A group that all of its members have formed.
pub(crate) struct Formed {
    pub generation: u32,
    pub members: Arc<[Member]>,
    /// Kept by the handles of this generation: while one is left, an older one cannot replace it.
    pub handle: Arc<()>,
}

impl Core {
    /// Begins to form a new group in place of the one of `generation`, or of the newest one if no
    /// handle was returned for that or its handle is gone.
    pub(crate) fn reform(&mut self, generation: u32) -> Result<()> {
        if self.closed || self.leaving {
            return Err(Error::Closed);
        }
        let replaced = generation != self.newest && self.held.strong_count() > 0;
        if replaced || self.phase != Phase::Idle {
            return Err(Error::Superseded);
        }
        if let Some(by) = self.excluded_by {
            return Err(Error::Excluded { by });
        }
        if self.unconfirmed && self.poisoned(self.newest).is_none() {
            self.confirm()
        } else {
            self.propose();
            Ok(())
        }
    }

    /// Begins a round of agreement.
    fn propose(&mut self) {
        let generation = self.newest;
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
        self.phase = Phase::Agreeing;
        self.advance_agreement();
    }

    /// Waits for every member of the newest group to have formed it, or continues to wait.
    fn confirm(&mut self) -> Result<()> {
        let sequence = self.gather(self.newest, Operation::Reform, Payload::Same(&[]))?;
        self.phase = Phase::Confirming(sequence);
        Ok(())
    }

    /// Goes on with the new group as far as the messages that came allow. A loss on the way leads to
    /// a further round of agreement.
    pub(crate) fn reform_poll(&mut self) -> Option<Result<Formed>> {
        loop {
            if self.closed || self.leaving {
                return Some(Err(Error::Closed));
            }
            if let Some(by) = self.excluded_by {
                return Some(Err(Error::Excluded { by }));
            }
            match self.phase {
                Phase::Idle => return Some(Err(Error::Superseded)),
                Phase::Agreeing => match self.agreement.as_ref().map(Agreement::outcome)? {
                    Outcome::Pending(_) => return None,
                    Outcome::Excluded(by) => return Some(Err(Error::Excluded { by })),
                    Outcome::Agreed(view) => {
                        self.form(&view);
                        // A group that is poisoned already has its next round below.
                        if self.confirm().is_err() {
                            self.propose();
                        }
                    }
                },
                Phase::Confirming(sequence) => match self.gather_done(self.newest, sequence)? {
                    Ok(_) => return Some(Ok(self.formed())),
                    Err(Error::Poisoned(_) | Error::Left { .. }) => self.propose(),
                    Err(error) => return Some(Err(error)),
                },
            }
        }
    }

    fn formed(&mut self) -> Formed {
        self.unconfirmed = false;
        self.phase = Phase::Idle;
        let handle = Arc::new(());
        self.held = Arc::downgrade(&handle);
        let members = self.groups.get(&self.newest).map(|group| group.members.clone());
        Formed { generation: self.newest, members: members.unwrap_or_default(), handle }
    }

    /// The ranks that the new group waits for, by original rank.
    pub(crate) fn reform_missing(&self) -> Vec<Rank> {
        match (self.phase, self.agreement.as_ref().map(Agreement::outcome)) {
            (Phase::Agreeing, Some(Outcome::Pending(missing))) => missing,
            (Phase::Confirming(sequence), _) => {
                let members = self.groups.get(&self.newest).map(|group| &*group.members);
                let members = members.unwrap_or_default();
                let missing = self.gather_missing(self.newest, sequence);
                let original = |rank: &Rank| members.get(rank.index()).map(|m| m.original_rank);
                missing.iter().filter_map(original).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The program stops waiting. A proposal is taken back: one that no rank stands behind must not
    /// be agreed to later. A group that was formed here stays, for the next call to go on with.
    pub(crate) fn reform_pause(&mut self) {
        if let Phase::Confirming(sequence) = std::mem::replace(&mut self.phase, Phase::Idle) {
            self.gather_pause(self.newest, sequence);
        }
        if let Some(agreement) = self.agreement.take() {
            let view = View { generation: agreement.generation(), members: BTreeSet::new() };
            self.broadcast(&Message::View(view));
        }
    }

    /// Makes what was agreed the newest group and closes the connections to all other ranks.
    fn form(&mut self, view: &View) {
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
        self.groups.entry(view.generation).or_default().members = members;
        let before = std::mem::replace(&mut self.newest, view.generation);
        self.drop_old_messages();
        self.groups.retain(|generation, _| *generation >= before);
        self.agreement = None;
        self.unconfirmed = true;
        self.held = Weak::new();
    }

    /// Drops what peers sent in generations that were replaced.
    fn drop_old_messages(&mut self) {
        for (_, group) in self.groups.range_mut(..self.newest) {
            for (from, bytes) in std::mem::take(&mut group.mail).waiting() {
                if let Some(peer) = self.peers.get_mut(&from) {
                    peer.queued = peer.queued.saturating_sub(bytes);
                }
            }
            for (from, part) in group.gathers.split_off(&group.next_sequence).values().flatten() {
                if let Some(peer) = self.peers.get_mut(from) {
                    peer.ahead = peer.ahead.saturating_sub(part.weight());
                }
            }
        }
    }

    pub(super) fn viewed(&mut self, from: Rank, view: View) {
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

    pub(super) fn advance_agreement(&mut self) {
        let Some(agreement) = &mut self.agreement else { return };
        self.proposed = agreement.generation();
        if let Some(view) = agreement.announcement() {
            self.broadcast(&Message::View(view));
        }
    }
}

#[cfg(test)]
#[path = "reform_tests.rs"]
mod tests;
