//! Group re-formation by the survivors.
//!
//! A call runs view changes until one succeeds. In each, the survivors settle on a view, form the group,
//! and confirm it by a collective call ([`Operation::Reform`]), so that a group is returned once all
//! members have formed it. A loss before that poisons the new group and starts the next view change.

use super::call::Payload;
use super::reform_phase::{FormedGroup, ReformPhase};
use super::{Action, Core};
use crate::message::Message;
use crate::view_change::{View, ViewChange, ViewOutcome};
use crate::{Cause, Error, Member, Operation, PeerStatus, Poison, Rank, Result, member};
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

impl Core {
    /// Begins to replace the group in `generation`, or the newest group if the program holds no handle to
    /// it.
    pub(crate) fn reform(&mut self, generation: u32) -> Result<()> {
        if self.closed || self.leaving {
            return Err(Error::Closed);
        }
        let replaced = generation != self.newest && self.handle.strong_count() > 0;
        if replaced || self.phase != ReformPhase::Idle {
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

    /// Begins a view change.
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
        let mut view_change = ViewChange::new(self.me, alive, proposal);
        for (peer, view) in &self.views {
            if view.generation > generation {
                view_change.receive(*peer, view.clone());
            }
        }
        self.view_change = Some(view_change);
        self.phase = ReformPhase::Agreeing;
        self.advance_view_change();
    }

    /// Begins or continues the collective call that confirms the newest group.
    fn confirm(&mut self) -> Result<()> {
        let sequence = self.gather(self.newest, Operation::Reform, Payload::Same(&[]))?;
        self.phase = ReformPhase::Confirming(sequence);
        Ok(())
    }

    /// Advances the call as far as the received messages allow. A loss starts a further view change.
    pub(crate) fn reform_poll(&mut self) -> Option<Result<FormedGroup>> {
        loop {
            if self.closed || self.leaving {
                return Some(Err(Error::Closed));
            }
            if let Some(by) = self.excluded_by {
                return Some(Err(Error::Excluded { by }));
            }
            match self.phase {
                ReformPhase::Idle => return Some(Err(Error::Superseded)),
                ReformPhase::Agreeing => {
                    match self.view_change.as_ref().map(ViewChange::outcome)? {
                        ViewOutcome::Pending(_) => return None,
                        ViewOutcome::Excluded(by) => return Some(Err(Error::Excluded { by })),
                        ViewOutcome::Agreed(view) => {
                            self.form(&view);
                            // The group is poisoned already: next view change.
                            if self.confirm().is_err() {
                                self.propose();
                            }
                        }
                    }
                }
                ReformPhase::Confirming(sequence) => {
                    match self.gather_done(self.newest, sequence)? {
                        Ok(_) => return Some(Ok(self.formed())),
                        Err(Error::Poisoned(_) | Error::Left { .. }) => self.propose(),
                        Err(error) => return Some(Err(error)),
                    }
                }
            }
        }
    }

    fn formed(&mut self) -> FormedGroup {
        self.unconfirmed = false;
        self.phase = ReformPhase::Idle;
        let handle = Arc::new(());
        self.handle = Arc::downgrade(&handle);
        let members = self.groups.get(&self.newest).map(|group| group.members.clone());
        FormedGroup { generation: self.newest, members: members.unwrap_or_default(), handle }
    }

    /// Original ranks that block the call.
    pub(crate) fn reform_missing(&self) -> Vec<Rank> {
        match (self.phase, self.view_change.as_ref().map(ViewChange::outcome)) {
            (ReformPhase::Agreeing, Some(ViewOutcome::Pending(missing))) => missing,
            (ReformPhase::Confirming(sequence), _) => {
                let members = self.groups.get(&self.newest).map(|group| &*group.members);
                let members = members.unwrap_or_default();
                let missing = self.gather_missing(self.newest, sequence);
                let original = |rank: &Rank| members.get(rank.index()).map(|m| m.original_rank);
                missing.iter().filter_map(original).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Suspends the call. A proposed view is withdrawn, since peers must not settle on it without this
    /// rank. A group formed here stays, and the next call continues with it.
    pub(crate) fn reform_pause(&mut self) {
        if let ReformPhase::Confirming(sequence) =
            std::mem::replace(&mut self.phase, ReformPhase::Idle)
        {
            self.gather_pause(self.newest, sequence);
        }
        if let Some(view_change) = self.view_change.take() {
            let view = View { generation: view_change.generation(), members: BTreeSet::new() };
            self.broadcast(&Message::View(view));
        }
    }

    /// Makes the settled view the newest group and closes the connections to all other ranks.
    fn form(&mut self, view: &View) {
        let old = self.groups.get(&self.newest).map(|group| group.members.clone());
        let survivors = old.iter().flat_map(|members| members.iter());
        let survivors = survivors.filter(|m| view.members.contains(&m.original_rank)).cloned();
        let members: Arc<[Member]> = member::number_members(survivors).into();
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
        self.view_change = None;
        self.unconfirmed = true;
        self.handle = Weak::new();
    }

    /// Drops unreceived messages and parts from replaced generations.
    fn drop_old_messages(&mut self) {
        for (_, group) in self.groups.range_mut(..self.newest) {
            for (from, bytes) in std::mem::take(&mut group.messages).unreceived() {
                if let Some(peer) = self.peers.get_mut(&from) {
                    peer.queued = peer.queued.saturating_sub(bytes);
                }
            }
            for (from, part) in group.gathers.split_off(&group.next_sequence).values().flatten() {
                if let Some(peer) = self.peers.get_mut(from) {
                    peer.ahead = peer.ahead.saturating_sub(part.stored_bytes());
                }
            }
        }
    }

    pub(super) fn view_received(&mut self, from: Rank, view: View) {
        if !view.members.is_empty() && !view.members.contains(&self.me) {
            self.excluded_by.get_or_insert(from);
        }
        if view.members.is_empty() {
            self.views.remove(&from);
        } else {
            self.views.insert(from, view.clone());
        }
        if let Some(view_change) = &mut self.view_change {
            view_change.receive(from, view);
            self.advance_view_change();
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
        // It takes part in a view change, so it has left this group.
        let detail = "it forms a new group".to_string();
        self.poison(self.newest, Poison { kind: Cause::Lost, rank: Some(rank), detail });
    }

    pub(super) fn advance_view_change(&mut self) {
        let Some(view_change) = &mut self.view_change else { return };
        self.proposed = view_change.generation();
        if let Some(view) = view_change.announcement() {
            self.broadcast(&Message::View(view));
        }
    }
}

#[cfg(test)]
#[path = "reform_tests.rs"]
mod tests;
