//! Ranks of one host: how they meet, pass descriptors, and write to each other's mapped memory.
//!
//! The `shm` and `copy` providers and the GPU heap stand on this module. Each rank listens on an
//! abstract Unix socket; the control plane carries its address and token. Ranks meet over one socket
//! for each pair, prove themselves by token, and pass sealed memory without names as descriptors. What
//! is mapped is written by plain stores; one release store of a lane makes them visible.
//!
//! Every process that was given a descriptor is trusted: it can write all of that region at any time,
//! and what it has mapped cannot be taken back. That is why a poisoned group's memory is never used
//! again. A peer's death is noticed by the control plane.
//!
//! - `LocalPeers` (`peers.rs`): this rank's regions, and the table of its peers
//! - `Peer` (`peer.rs`): one peer's mapped regions and lanes: stores, raises
//! - [`Exchange`] (`exchange.rs`): one descriptor to each peer and one from each, for the GPU heap
//! - `Meeting` (`meeting.rs`): the loop in which all pairs of ranks meet; `pending.rs`: one peer in it
//! - `Link` (`link.rs`): a Unix socket whose messages carry descriptors
//! - `Address` (`address.rs`): a process of this host, and which processes can meet
//! - [`WaitLimit`] (`wait.rs`): the deadline of a wait, and its other reasons to stop
//! - `socket.rs`: the system calls for sockets

mod address;
mod exchange;
mod link;
mod meeting;
mod peer;
mod peers;
mod pending;
mod socket;
#[cfg(test)]
mod tests;
mod wait;

#[cfg(any(test, feature = "fuzz"))]
pub use address::fuzz as fuzz_address;

use crate::error::Error;
use crate::types::ProviderKind;
use address::{Address, Token};
use link::{Link, Message};
use meeting::{Meeting, MetPeer};
use peer::Peer;
use pending::Party;
use weft_control::Rank;

pub use exchange::Exchange;
pub(crate) use peers::{ENTRY_BYTES, LocalPeers};
pub use wait::WaitLimit;

/// Regions of one rank that can be known at a time. Keys are small numbers, given out densely.
const MAX_REGIONS: usize = 1 << 16;

/// A connection to `peer` that failed.
fn refused(provider: ProviderKind, peer: Rank, detail: impl ToString) -> Error {
    Error::Connect { peer, provider, detail: detail.to_string() }
}
