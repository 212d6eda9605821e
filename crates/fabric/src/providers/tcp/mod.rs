//! Any host, over TCP sockets.
//!
//! Each pair has several streams. A part of a write is one frame on one stream, the least loaded. The
//! receiver checks a frame against its own grants before any byte touches memory. `docs/wire-format.md`
//! describes the bytes.
//!
//! - `config.rs`, `device.rs`, `link.rs`: configuration; the device; one group's use of it
//! - `wire.rs`: addresses, hellos and frames as bytes
//! - `connect.rs`, `handshake.rs`: connections to all peers, with a bound on unknown ones
//! - `adopted.rs`, `adoption.rs`: link over a connection that the pair protocol made
//! - `peer.rs`, `regions.rs`: a peer's streams, and how it is lost; memory by key
//! - `channel.rs`: stream socket, with or without TLS
//! - `stream.rs`, `send_queue.rs`: one connection, and unsent frames on it; `hot_stream.rs`: reads
//!   without epoll
//! - `segments.rs`, `socket.rs`: a frame's pages, and the system calls that move them

mod adopted;
mod adoption;
#[cfg(all(test, not(miri)))]
#[path = "../../../../control/tests/common/certificates.rs"]
mod certificates;
mod channel;
mod config;
mod connect;
mod device;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod handshake;
mod hot_stream;
mod link;
mod peer;
mod regions;
mod segments;
mod send_queue;
mod socket;
mod stream;
mod wire;

pub use adopted::{AdoptedTcp, random_token};
pub use adoption::Adoption;
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::{stream as fuzz_stream, wire as fuzz_wire};

pub use config::{TcpConfig, TcpCounters};
pub use device::TcpDevice;
