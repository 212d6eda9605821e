//! Descriptor exchange: one descriptor of this rank to every peer of its host, and one from each.
//!
//! For memory shared by descriptor outside of a provider, such as the GPU heap. The rendezvous is that of a
//! provider: each end is authenticated by a token from the control plane; unproven connections and
//! processes of other users are dropped.

use super::{
    ConnectedPeer, LocalAddress, LocalMessage, Rendezvous, RendezvousEnd, WaitLimit, connect_error,
    socket,
};
use crate::error::Result;
use crate::types::{Generation, ProviderKind, RegionKey};
use rustix::fd::{BorrowedFd, OwnedFd};
use weft_control::Rank;

/// Provider named in errors.
const KIND: ProviderKind = ProviderKind::Shm;

/// One rank's end of an exchange. It listens from its opening on, so peers can dial in any order.
#[derive(Debug)]
pub struct DescriptorExchange {
    address: LocalAddress,
    listener: OwnedFd,
}

impl DescriptorExchange {
    /// Opens an end and listens. `host_id` names this host; ranks of different names do not connect.
    ///
    /// # Errors
    /// [`crate::Error::System`] if the socket cannot be opened.
    pub fn open(host_id: &str) -> Result<DescriptorExchange> {
        let address = LocalAddress::new(host_id)?;
        let listener = socket::listen(&address.name)?;
        Ok(DescriptorExchange { address, listener })
    }

    /// Address for the peers' [`DescriptorExchange::swap`]; a secret of the group.
    pub fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    /// Sends `descriptor` to each of `peers` (rank and [`DescriptorExchange::address`]) and returns the
    /// descriptor of each, in the order of `peers`. Collective.
    ///
    /// # Errors
    /// [`crate::Error::Malformed`] for malformed addresses; [`crate::Error::Connect`], which names the
    /// first peer that is unreachable, violates the protocol or has not connected before the deadline; an
    /// error of [`WaitLimit::give_up`].
    pub fn swap(
        self,
        rank: Rank,
        peers: &[(Rank, &[u8])],
        descriptor: BorrowedFd<'_>,
        limit: &mut WaitLimit<'_>,
    ) -> Result<Vec<OwnedFd>> {
        let introduction = || {
            let memory = descriptor.try_clone_to_owned()?;
            Ok(LocalMessage::Region { key: RegionKey(0), serial: 0, memory })
        };
        let own = RendezvousEnd {
            kind: KIND,
            rank,
            generation: Generation(0),
            token: self.address.token,
            listener: &self.listener,
            introduction: &introduction,
        };
        let descriptor = |ConnectedPeer { rank, introduction, .. }| match introduction {
            LocalMessage::Region { memory, .. } => Ok(memory),
            _ => Err(connect_error(KIND, rank, "it sent another message in place of a descriptor")),
        };
        Rendezvous::new(own, peers)?.run(limit)?.into_iter().map(descriptor).collect()
    }
}
