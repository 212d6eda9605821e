//! Connection peer: rank, and departure.

use std::fmt;
use std::sync::Arc;
use weft_fabric::{Cause, Engine, Poison, PoisonFlag, Rank};

/// Other end of a connection.
pub(crate) struct Peer {
    pub rank: Rank,
    flag: Arc<PoisonFlag>,
}

impl Peer {
    /// Peer in this engine's group.
    pub fn of(engine: &Engine, rank: Rank) -> Peer {
        Peer { rank, flag: engine.poison_flag().clone() }
    }

    /// True once it has left in order: what it wrote before arrives, and no more follows.
    #[inline]
    pub fn has_left(&self) -> bool {
        self.flag.has_left(self.rank)
    }

    /// Poisons the group: the peer has left, and what it owes has not come.
    pub fn poison(&self, detail: String) {
        self.flag.poison(Poison { kind: Cause::Lost, rank: Some(self.rank), detail });
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("rank", &self.rank)
            .field("has_left", &self.has_left())
            .finish_non_exhaustive()
    }
}
