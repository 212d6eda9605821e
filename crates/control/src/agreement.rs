//! Who survives: an agreement among the ranks that are left.
//!
//! Every survivor tells the others its view: whom it holds for alive, and the generation it
//! proposes. Views only shrink and generations only rise, so all settle on the same. A rank is
//! done once every member of its view has sent it that very view. A loss on the way makes a
//! smaller view and another turn.
//!
//! There is no quorum: a network cut in two yields two groups. A program for which that matters
//! looks at the size of the group it gets.

use crate::Rank;
use std::collections::{BTreeMap, BTreeSet};

/// Whom a rank holds for alive, and what it would call their group. Ranks are original ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct View {
    pub generation: u32,
    pub members: BTreeSet<Rank>,
}

/// One rank's part in an agreement.
#[derive(Debug)]
pub(crate) struct Agreement {
    me: Rank,
    view: View,
    /// The last view of each peer.
    heard: BTreeMap<Rank, View>,
    excluded_by: Option<Rank>,
    announced: bool,
}

/// Where an agreement stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// These have not sent the same view yet.
    Pending(Vec<Rank>),
    /// All members of the view agree on it.
    Agreed(View),
    /// A member of the view goes on without this rank.
    Excluded(Rank),
}

impl Agreement {
    pub(crate) fn new(me: Rank, alive: BTreeSet<Rank>, generation: u32) -> Agreement {
        let view = View { generation, members: alive };
        Agreement { me, view, heard: BTreeMap::new(), excluded_by: None, announced: false }
    }

    /// A peer is gone.
    pub(crate) fn lost(&mut self, peer: Rank) {
        if self.view.members.remove(&peer) {
            self.announced = false;
        }
    }

    /// A peer's view. One from a peer outside this rank's own view no longer counts. An empty one
    /// takes back what the peer said before.
    pub(crate) fn receive(&mut self, from: Rank, view: View) {
        if !self.view.members.contains(&from) {
            return;
        }
        if view.members.is_empty() {
            self.heard.remove(&from);
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
        self.heard.insert(from, view);
    }

    /// The view to tell every peer, if it is a new one.
    pub(crate) fn announcement(&mut self) -> Option<View> {
        if self.announced || self.excluded_by.is_some() {
            return None;
        }
        self.announced = true;
        Some(self.view.clone())
    }

    /// The generation proposed by now.
    pub(crate) fn generation(&self) -> u32 {
        self.view.generation
    }

    pub(crate) fn outcome(&self) -> Outcome {
        if let Some(by) = self.excluded_by {
            return Outcome::Excluded(by);
        }
        let differs = |peer: &&Rank| **peer != self.me && self.heard.get(peer) != Some(&self.view);
        let missing: Vec<Rank> = self.view.members.iter().filter(differs).copied().collect();
        if missing.is_empty() && self.announced {
            Outcome::Agreed(self.view.clone())
        } else {
            Outcome::Pending(missing)
        }
    }
}

#[cfg(test)]
#[path = "agreement_tests.rs"]
mod tests;
