//! View change: the protocol by which the survivors settle on the next generation's members.
//!
//! Each survivor sends the others a view: the ranks that it considers alive, and the generation that it
//! proposes. A received view shrinks the members to the intersection and raises the generation to the
//! maximum, so all views converge. A rank finishes once every member in its view has sent an equal view. A
//! loss shrinks the view and repeats the exchange.
//!
//! There is no quorum: a partitioned network yields one group for each part. Programs that must prevent
//! this check the new group's size.

use crate::Rank;
use std::collections::{BTreeMap, BTreeSet};

/// Ranks that one rank considers alive, and the generation that it proposes. Ranks are original ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct View {
    pub generation: u32,
    pub members: BTreeSet<Rank>,
}

/// One rank's state in a view change.
#[derive(Debug)]
pub(crate) struct ViewChange {
    me: Rank,
    view: View,
    /// Last view from each peer.
    views: BTreeMap<Rank, View>,
    excluded_by: Option<Rank>,
    announced: bool,
}

/// View change state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ViewOutcome {
    /// Ranks that have not sent an equal view.
    Pending(Vec<Rank>),
    /// View that all its members have sent.
    Agreed(View),
    /// Member in the view whose own view excludes this rank.
    Excluded(Rank),
}

impl ViewChange {
    pub(crate) fn new(me: Rank, alive: BTreeSet<Rank>, generation: u32) -> ViewChange {
        let view = View { generation, members: alive };
        ViewChange { me, view, views: BTreeMap::new(), excluded_by: None, announced: false }
    }

    /// Removes a lost peer.
    pub(crate) fn lost(&mut self, peer: Rank) {
        if self.view.members.remove(&peer) {
            self.announced = false;
        }
    }

    /// Handles a peer's view. Views from outside this rank's view are ignored; an empty view
    /// withdraws the peer's last one.
    pub(crate) fn receive(&mut self, from: Rank, view: View) {
        if !self.view.members.contains(&from) {
            return;
        }
        if view.members.is_empty() {
            self.views.remove(&from);
            return;
        }
        if !view.members.contains(&self.me) {
            self.excluded_by.get_or_insert(from);
            return;
        }
        let both = View {
            generation: self.view.generation.max(view.generation),
            members: self.view.members.intersection(&view.members).copied().collect(),
        };
        if both != self.view {
            self.view = both;
            self.announced = false;
        }
        self.views.insert(from, view);
    }

    /// View to send to every peer, if it changed.
    pub(crate) fn announcement(&mut self) -> Option<View> {
        if self.announced || self.excluded_by.is_some() {
            return None;
        }
        self.announced = true;
        Some(self.view.clone())
    }

    /// Generation proposed so far.
    pub(crate) fn generation(&self) -> u32 {
        self.view.generation
    }

    pub(crate) fn outcome(&self) -> ViewOutcome {
        if let Some(by) = self.excluded_by {
            return ViewOutcome::Excluded(by);
        }
        let differs = |peer: &&Rank| **peer != self.me && self.views.get(peer) != Some(&self.view);
        let missing: Vec<Rank> = self.view.members.iter().filter(differs).copied().collect();
        if missing.is_empty() && self.announced {
            ViewOutcome::Agreed(self.view.clone())
        } else {
            ViewOutcome::Pending(missing)
        }
    }
}

#[cfg(test)]
#[path = "view_change_tests.rs"]
mod tests;
