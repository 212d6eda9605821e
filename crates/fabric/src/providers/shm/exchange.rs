//! One descriptor of this rank to every peer of its host, and one of each of theirs to it.
//!
//! What shares memory by descriptor without being a provider, such as a heap of GPU memory, meets its
//! peers here in the way that shm does: over abstract Unix sockets, each end proved by a token that
//! travelled over the control plane, strangers and processes of other users dropped.

use super::address::Address;
use super::connect::{Meeting, Met, listen, refused};
use super::link::Message;
use crate::error::Result;
use crate::types::{Generation, ProviderKind, RegionKey, Time};
use rustix::fd::{BorrowedFd, OwnedFd};
use weft_control::Rank;

/// In whose name errors are reported.
const KIND: ProviderKind = ProviderKind::Shm;

/// One rank's end, listening from the moment it is opened, so that no peer can call too early.
#[derive(Debug)]
pub struct Exchange {
    address: Address,
    listener: OwnedFd,
}

impl Exchange {
    /// Opens it and listens. `host_id` names this host, as [`super::ShmConfig`] says.
    ///
    /// # Errors
    /// [`crate::Error::System`] if the system gives no socket.
    pub fn open(host_id: &str) -> Result<Exchange> {
        let address = Address::new(host_id)?;
        let listener = listen(&address.name)?;
        Ok(Exchange { address, listener })
    }

    /// What every peer must be told before it can swap with this rank. It is a secret of the group.
    pub fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    /// Gives `descriptor` to each of `peers` (rank and [`Exchange::address`]) and returns what each
    /// gave, in the order of `peers`. Every rank of the group calls this.
    ///
    /// # Errors
    /// [`crate::Error::Malformed`] if an address is none, [`crate::Error::Connect`] naming the first peer that cannot
    /// be reached, breaks the protocol or did not answer before the deadline.
    pub fn swap(
        self,
        rank: Rank,
        peers: &[(Rank, &[u8])],
        descriptor: BorrowedFd<'_>,
        deadline: Time,
    ) -> Result<Vec<OwnedFd>> {
        let give = || {
            let memory = descriptor.try_clone_to_owned()?;
            Ok(Message::Region { key: RegionKey(0), serial: 0, memory })
        };
        let (token, generation) = (self.address.token, Generation(0));
        let meeting = Meeting::new(KIND, rank, generation, token, &self.listener, &give, peers)?;
        let taken = meeting.run(deadline)?.into_iter().map(|Met { rank, given, .. }| match given {
            Message::Region { memory, .. } => Ok(memory),
            _ => Err(refused(KIND, rank, "it gave something else than a descriptor".into())),
        });
        taken.collect()
    }
}
