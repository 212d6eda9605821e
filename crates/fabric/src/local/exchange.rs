//! One descriptor of this rank to every peer of its host, and one of each of theirs to it.
//!
//! For memory that is shared by descriptor outside of a provider, such as a heap of GPU memory. Ranks
//! meet as those of a provider do: each end is proved by a token that travelled over the control plane;
//! strangers and processes of other users are dropped.

use super::{Address, Meeting, Message, MetPeer, Party, WaitLimit, refused, socket};
use crate::error::Result;
use crate::types::{Generation, ProviderKind, RegionKey};
use rustix::fd::{BorrowedFd, OwnedFd};
use weft_control::Rank;

/// The provider that errors name.
const KIND: ProviderKind = ProviderKind::Shm;

/// One rank's end. It listens from the moment it is opened, so peers can dial in any order.
#[derive(Debug)]
pub struct Exchange {
    address: Address,
    listener: OwnedFd,
}

impl Exchange {
    /// Opens it and listens. `host_id` names this host; ranks with different names do not meet.
    ///
    /// # Errors
    /// [`crate::Error::System`] if the system gives no socket.
    pub fn open(host_id: &str) -> Result<Exchange> {
        let address = Address::new(host_id)?;
        let listener = socket::listen(&address.name)?;
        Ok(Exchange { address, listener })
    }

    /// The bytes that each peer passes to its [`Exchange::swap`]. They are a secret of the group.
    pub fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    /// Gives `descriptor` to each of `peers` (rank and [`Exchange::address`]) and returns the descriptor
    /// of each, in the order of `peers`. Every rank of the group calls this.
    ///
    /// # Errors
    /// [`crate::Error::Malformed`] for an address that is none; [`crate::Error::Connect`], which names the
    /// first peer that cannot be reached, breaks the protocol or did not answer before the deadline;
    /// an error of [`WaitLimit::give_up`].
    pub fn swap(
        self,
        rank: Rank,
        peers: &[(Rank, &[u8])],
        descriptor: BorrowedFd<'_>,
        limit: &mut WaitLimit<'_>,
    ) -> Result<Vec<OwnedFd>> {
        let introduction = || {
            let memory = descriptor.try_clone_to_owned()?;
            Ok(Message::Region { key: RegionKey(0), serial: 0, memory })
        };
        let party = Party {
            kind: KIND,
            rank,
            generation: Generation(0),
            token: self.address.token,
            listener: &self.listener,
            introduction: &introduction,
        };
        let descriptor = |MetPeer { rank, introduction, .. }| match introduction {
            Message::Region { memory, .. } => Ok(memory),
            _ => Err(refused(KIND, rank, "it sent another message in place of a descriptor")),
        };
        Meeting::new(party, peers)?.run(limit)?.into_iter().map(descriptor).collect()
    }
}
