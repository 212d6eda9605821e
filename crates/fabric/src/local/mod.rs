//! Ranks of one host: rendezvous, descriptor passing, and writes to each other's mapped memory.
//!
//! The `shm` and `copy` providers and the GPU heap use this module. Each rank listens on an abstract Unix
//! socket; the control plane carries its address and token. Each pair of ranks connects over one socket,
//! authenticates by token, and passes sealed anonymous memory as descriptors. Mapped memory is written by
//! plain stores; one release store of a lane makes them visible.
//!
//! A process that received a descriptor is trusted: it can write all of that region at any time, and its
//! mapping cannot be revoked. A poisoned group's memory is therefore never reused. The control plane
//! detects the death of a peer.
//!
//! - `LocalPeers` (`peers.rs`): this rank's regions, and its peers
//! - `LocalPeer` (`peer.rs`): one peer's mapped regions and lanes: stores, raises
//! - [`DescriptorExchange`] (`descriptor_exchange.rs`): one descriptor to each peer and one from each, for
//!   the GPU heap
//! - `Rendezvous` (`rendezvous.rs`): the loop that connects all pairs; `pending_peer.rs`: one pair in
//!   it
//! - `DescriptorSocket` (`descriptor_socket.rs`): a Unix socket whose messages carry descriptors
//! - `LocalAddress` (`address.rs`): a process of this host, and the domain of processes that it reaches
//! - [`WaitLimit`] (`wait.rs`): the deadline of a wait, and its check for other reasons to stop
//! - `socket.rs`: abstract Unix sockets

mod address;
mod descriptor_exchange;
mod descriptor_socket;
mod peer;
mod peers;
mod pending_peer;
mod rendezvous;
mod socket;
#[cfg(test)]
mod tests;
mod wait;

#[cfg(any(test, feature = "fuzz"))]
pub use address::fuzz as fuzz_address;

use crate::error::Error;
use crate::types::ProviderKind;
use address::{LocalAddress, ProofToken};
use descriptor_socket::{DescriptorSocket, LocalMessage};
use peer::LocalPeer;
use pending_peer::RendezvousEnd;
use rendezvous::{ConnectedPeer, Rendezvous};
use weft_control::Rank;

pub use descriptor_exchange::DescriptorExchange;
pub(crate) use peers::{ENTRY_BYTES, LocalPeers};
pub use wait::WaitLimit;

/// Limit of regions of one rank. Keys are small and dense.
const MAX_REGIONS: usize = 1 << 16;

/// Error of a failed connection to `peer`.
fn connect_error(provider: ProviderKind, peer: Rank, detail: impl ToString) -> Error {
    Error::Connect { peer, provider, detail: detail.to_string() }
}
