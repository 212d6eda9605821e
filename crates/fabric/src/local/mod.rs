//! Ranks on one host: rendezvous, descriptor passing, and writes to each other's mapped memory.
//!
//! The `shm` and `copy` providers and the GPU heap use this module. Each rank listens on an abstract Unix
//! socket; the control plane carries the socket's address and token. Each pair of ranks connects over one
//! socket, authenticates by token, and passes sealed anonymous memory as descriptors. The connection ends
//! with the introductions; later descriptors, for grants and for sleeps on descriptors, travel over a
//! connection each, so that a connected rank keeps one socket. Mapped memory is written by plain stores;
//! one release store to a lane makes them visible.
//!
//! A process that received a descriptor is trusted: it can write all of that region at any time, and the
//! mapping cannot be revoked. A poisoned group's memory is therefore never reused. The control plane
//! detects a peer's death.
//!
//! - `LocalPeers` (`peers.rs`): this rank's regions and peers
//! - `LocalPeer` (`peer.rs`): one peer's mapped regions and lanes: stores, raises
//! - [`DescriptorExchange`] (`descriptor_exchange.rs`): one descriptor to each peer and one from each, for
//!   the GPU heap
//! - `Rendezvous` (`rendezvous.rs`): the loop that connects all pairs; `pending_peer.rs`: one pair in
//!   it
//! - `Outbox` (`outbox.rs`), `Arrivals` (`arrivals.rs`): descriptors to and from connected peers
//! - `DescriptorSocket` (`descriptor_socket.rs`): a Unix socket whose messages carry descriptors
//! - `LocalAddress` (`address.rs`): a process on this host, and the domain that it reaches
//! - `PeerCredentials` (`credentials.rs`): process and user at the other end of a socket
//! - [`WaitLimit`] (`wait.rs`): wait deadline, and a check for other reasons to stop
//! - `socket.rs`: abstract Unix sockets

mod address;
mod arrivals;
mod credentials;
mod descriptor_exchange;
mod descriptor_socket;
mod errors;
mod outbox;
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

pub use descriptor_exchange::DescriptorExchange;
pub(crate) use peers::{ENTRY_BYTES, LocalPeers};
pub use wait::WaitLimit;
