//! Descriptor exchange: one descriptor from this rank to every peer on the host, and one from each.
//!
//! For memory shared by descriptor outside a provider, such as the GPU heap. The rendezvous works as in a
//! provider: a token from the control plane authenticates each end; unproven connections and other users'
//! processes are dropped.

use super::address::LocalAddress;
use super::descriptor_socket::LocalMessage;
use super::errors::connect_error;
use super::outbox::Hello;
use super::pending_peer::RendezvousEnd;
use super::rendezvous::{ConnectedPeer, Rendezvous};
use super::{WaitLimit, socket};
use crate::error::Result;
use crate::types::{Generation, ProviderKind, RegionKey};
use rustix::fd::{BorrowedFd, OwnedFd};
use weft_control::Rank;

/// Provider named in errors.
const KIND: ProviderKind = ProviderKind::Shm;

/// One rank's end in an exchange. It listens as soon as it is open, so peers can dial in any order.
#[derive(Debug)]
pub struct DescriptorExchange {
    address: LocalAddress,
    listener: OwnedFd,
}

impl DescriptorExchange {
    /// Opens an end and listens. `host_id` names this host; ranks with different names do not connect.
    ///
    /// # Errors
    /// [`crate::Error::System`] if the socket cannot be opened.
    pub fn open(host_id: &str) -> Result<DescriptorExchange> {
        let address = LocalAddress::new(host_id)?;
        let listener = socket::listen(&address.name)?;
        Ok(DescriptorExchange { address, listener })
    }

    /// Address for the peers' [`DescriptorExchange::swap`]; a group secret.
    pub fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    /// Sends `descriptor` to each of `peers` (rank and [`DescriptorExchange::address`]) and returns each
    /// peer's descriptor, in `peers` order. Collective.
    ///
    /// # Errors
    /// [`crate::Error::Malformed`] for malformed addresses; [`crate::Error::Connect`], which names the
    /// first peer that is unreachable, violates the protocol or has not connected before the deadline; an
    /// error from [`WaitLimit::give_up`].
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
            hello: Hello { from: rank, generation: Generation(0), token: self.address.token },
            listener: &self.listener,
            introduction: &introduction,
        };
        let descriptor = |ConnectedPeer { rank, introduction, .. }| match introduction {
            LocalMessage::Region { memory, .. } => Ok(memory),
            _ => Err(connect_error(KIND, rank, "it sent another message in place of a descriptor")),
        };
        Rendezvous::new(own, peers)?.run(limit)?.peers.into_iter().map(descriptor).collect()
    }
}
