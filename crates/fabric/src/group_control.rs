//! Group control: the full control plane, or a pair's control connection.

use std::sync::Arc;
use std::time::Duration;
use weft_control::pair::PairControl;
use weft_control::{Control, Error, Member, Operation, PeerStatus, Poison, Rank, Result};

/// Group control, with the [`Control`] calls for both ways to form a group.
#[derive(Clone)]
pub enum GroupControl {
    /// Group formed by a rendezvous, or re-formed.
    Mesh(Control),
    /// Pair formed by `listen` and `connect`.
    Pair(PairMembers),
}

/// A pair's control connection and two members.
#[derive(Clone)]
pub struct PairMembers {
    pub(crate) control: Arc<PairControl>,
    pub(crate) members: Arc<[Member]>,
}

impl GroupControl {
    /// The full control plane; `None` for a pair.
    pub fn mesh(&self) -> Option<&Control> {
        match self {
            GroupControl::Mesh(control) => Some(control),
            GroupControl::Pair(_) => None,
        }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        match self {
            GroupControl::Mesh(control) => control.rank(),
            GroupControl::Pair(pair) => pair.control.rank(),
        }
    }

    /// Ranks in the group.
    pub fn world_size(&self) -> u32 {
        self.members().len() as u32
    }

    /// Group generation; 0 for a pair.
    pub fn generation(&self) -> u32 {
        self.mesh().map_or(0, Control::generation)
    }

    /// All members, by rank.
    pub fn members(&self) -> &[Member] {
        match self {
            GroupControl::Mesh(control) => control.members(),
            GroupControl::Pair(pair) => &pair.members,
        }
    }

    /// An error if operations in flight on this group cannot succeed ([`Control::check`]).
    ///
    /// # Errors
    /// [`Error::Poisoned`]; [`Error::Left`]; [`Error::Superseded`]; [`Error::Closed`];
    /// [`Error::Forked`]; [`Error::Interrupted`].
    pub fn check(&self) -> Result<()> {
        match self {
            GroupControl::Mesh(control) => control.check(),
            GroupControl::Pair(pair) => pair.control.check(),
        }
    }

    /// Fails the group at every rank. The first cause wins.
    pub fn poison(&self, cause: &Poison) {
        match self {
            GroupControl::Mesh(control) => control.poison(cause),
            GroupControl::Pair(pair) => pair.control.poison(cause),
        }
    }

    /// The cause, if the group is poisoned.
    pub fn poisoned(&self) -> Option<Poison> {
        match self {
            GroupControl::Mesh(control) => control.poisoned(),
            GroupControl::Pair(pair) => pair.control.poisoned(),
        }
    }

    /// Calls `call` once when the group is poisoned; immediately if it is poisoned already.
    pub fn on_poison(&self, call: Box<dyn Fn(&Poison) + Send + Sync>) {
        match self {
            GroupControl::Mesh(control) => control.on_poison(call),
            GroupControl::Pair(pair) => pair.control.on_poison(call),
        }
    }

    /// Calls `call` for every rank that leaves the group; immediately for those that have left.
    pub fn on_peer_left(&self, call: Box<dyn Fn(Rank) + Send + Sync>) {
        match self {
            GroupControl::Mesh(control) => control.on_peer_left(call),
            GroupControl::Pair(pair) => pair.control.on_peer_left(call),
        }
    }

    /// Rank status; an unknown rank is lost.
    pub fn peer_status(&self, rank: Rank) -> PeerStatus {
        match self {
            GroupControl::Mesh(control) => control.peer_status(rank),
            GroupControl::Pair(pair) if rank == pair.control.rank() => PeerStatus::Alive,
            GroupControl::Pair(pair) if rank == pair.control.peer() => pair.control.peer_status(),
            GroupControl::Pair(_) => PeerStatus::Lost,
        }
    }

    /// Monotonic clock at `rank` minus the clock at rank 0, in nanoseconds. Zero for pairs, which do not
    /// measure it.
    pub fn clock_offset(&self, rank: Rank) -> i64 {
        self.mesh().map_or(0, |control| control.clock_offset(rank))
    }

    /// Error bound for [`GroupControl::clock_offset`] in nanoseconds; for a pair across hosts it is
    /// unknown, `u64::MAX`.
    pub fn clock_error(&self, rank: Rank) -> u64 {
        match self {
            GroupControl::Mesh(control) => control.clock_error(rank),
            GroupControl::Pair(pair) => {
                let same = pair.members.windows(2).all(|both| both[0].host_id == both[1].host_id);
                if same { 0 } else { u64::MAX }
            }
        }
    }

    /// [`Control::all_gather`].
    ///
    /// # Errors
    /// Same as [`Control::all_gather`].
    pub fn all_gather(&self, payload: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.all_gather_as(Operation::AllGather, payload, timeout)
    }

    /// [`Control::all_gather_as`].
    ///
    /// # Errors
    /// Same as [`Control::all_gather`].
    pub fn all_gather_as(
        &self,
        operation: Operation,
        payload: &[u8],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        match self {
            GroupControl::Mesh(control) => control.all_gather_as(operation, payload, timeout),
            GroupControl::Pair(pair) => pair.exchange(operation, payload, payload, timeout),
        }
    }

    /// [`Control::exchange_as`].
    ///
    /// # Errors
    /// Same as [`Control::exchange`].
    pub fn exchange_as(
        &self,
        operation: Operation,
        to_each: &[Vec<u8>],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        match self {
            GroupControl::Mesh(control) => control.exchange_as(operation, to_each, timeout),
            GroupControl::Pair(pair) => {
                let (given, world_size) = (to_each.len(), pair.members.len());
                if given != world_size {
                    let operation = operation.name();
                    return Err(Error::WrongCount { operation, given, world_size });
                }
                let (me, peer) = (pair.control.rank().index(), pair.control.peer().index());
                pair.exchange(operation, &to_each[me], &to_each[peer], timeout)
            }
        }
    }

    /// Leaves the group: the peers see a departure instead of a loss.
    pub fn leave(&self) {
        match self {
            GroupControl::Mesh(control) => control.leave(),
            GroupControl::Pair(pair) => pair.control.leave(),
        }
    }

    /// Ends the connections without a departure message, as a crash does, for loss tests.
    pub fn abandon(&self) {
        match self {
            GroupControl::Mesh(control) => control.abandon(),
            GroupControl::Pair(pair) => pair.control.abandon(),
        }
    }
}

impl PairMembers {
    fn exchange(
        &self,
        operation: Operation,
        own: &[u8],
        to_peer: &[u8],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        let came = self.control.exchange(operation, to_peer, timeout)?;
        let mut by_rank = vec![own.to_vec(), came];
        if self.control.rank() > self.control.peer() {
            by_rank.reverse();
        }
        Ok(by_rank)
    }
}
