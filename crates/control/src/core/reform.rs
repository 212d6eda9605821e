//! The agreement on the survivors, and the group that they form.

use super::{Action, Core};
use crate::agreement::{Agreement, Outcome, View};
use crate::message::Message;
use crate::{Cause, Error, Member, PeerStatus, Poison, Rank, Result, member};
use std::collections::BTreeSet;
use std::sync::Arc;

impl Core {
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
        self.groups.entry(view.generation).or_default().members = members.clone();
        let before = std::mem::replace(&mut self.newest, view.generation);
        self.drop_old_messages();
        self.groups.retain(|generation, _| *generation >= before);
        self.agreement = None;
        members
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
