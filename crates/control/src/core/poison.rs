//! Group poison: the first cause wins and reaches every rank.

use super::{Action, Core, PeerLeftCallback, PoisonCallback};
use crate::message::Message;
use crate::{Member, PeerStatus, Poison, Rank};

impl Core {
    /// Poisons a generation unless it is poisoned already, and sends the cause to every peer.
    pub(crate) fn poison(&mut self, generation: u32, poison: Poison) {
        if generation < self.newest && !self.groups.contains_key(&generation) {
            return;
        }
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

    /// Registers a callback, or returns it with the existing poison.
    pub(crate) fn on_poison(
        &mut self,
        generation: u32,
        call: PoisonCallback,
    ) -> Option<(PoisonCallback, Poison)> {
        let group = self.groups.entry(generation).or_default();
        match &group.poison {
            Some(poison) => Some((call, poison.clone())),
            None => {
                group.on_poison.push(call);
                None
            }
        }
    }

    /// Registers a callback and returns the ranks that have left already.
    pub(crate) fn on_left(&mut self, generation: u32, call: PeerLeftCallback) -> Vec<Rank> {
        let group = self.groups.entry(generation).or_default();
        group.on_left.push(call);
        let left = |m: &&Member| {
            self.peers.get(&m.original_rank).is_some_and(|p| p.status == PeerStatus::Left)
        };
        group.members.iter().filter(left).map(|m| m.rank).collect()
    }
}
