//! Weft's control plane: rendezvous, failure detection, membership and small messages between ranks.
//!
//! [`Config::from_env`] reads the launcher's variables; [`Control::connect`] joins the group and returns
//! a handle: [`Control::all_gather`] and [`Control::exchange`] for small payloads, [`Control::send`] to
//! one rank, [`Control::poison`] to fail the group at every rank, and [`Control::reform`] to continue with
//! the survivors. Bulk data travels through `weft-fabric`.
//!
//! - [`config`]: rank, world size and rank 0's address from arguments and environment; `nodelist`: Slurm
//! - `rendezvous`: addresses exchanged through rank 0, one connection for each rank pair
//! - `dial`, `connect`, `resolve`, `rank_listener`: both sides in connection set-up
//! - `handshake`, `secret`, `tls`: mutual authentication, pair encryption; `wire`, `message`, [`bytes`]: frames and
//!   fields
//! - `neighbour`: user behind the process at the other end, in place of a secret
//! - `mesh`: the background thread with all sockets; `control`: the handle; `clock`: aligned clocks
//! - `core`: collective calls, messages, poison and `reform`, without sockets or a clock
//! - `view_change`: the protocol by which the survivors settle on the next group
//! - [`pair`]: control connection in a group of two
//! - [`limits`]: what has run out when a system call fails
//! - [`fork_guard`]: descriptors that forked children close; [`random`]: the seeded generator; [`Rounded`]: durations in
//!   messages
#![warn(missing_docs)]

pub mod bytes;
mod clock;
pub mod config;
mod connect;
mod control;
mod core;
mod deadline;
mod dial;
mod error;
pub mod fork_guard;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod handshake;
mod host;
pub mod limits;
mod member;
mod mesh;
mod message;
mod neighbour;
mod nodelist;
mod operation;
pub mod pair;
mod poison;
pub mod random;
mod rank_listener;
mod rendezvous;
mod resolve;
mod rounded;
mod secret;
mod tls;
mod view_change;
mod wire;

pub use clock::monotonic_ns;
pub use config::{Config, Interrupt, Overrides};
pub use control::{Control, local_world};
pub use error::{Error, Result};
pub use host::HostIdentity;
pub use member::{Member, PeerStatus, Rank};
pub use operation::Operation;
pub use poison::{Cause, Poison};
pub use rounded::Rounded;
pub use secret::Secret;
pub use tls::Tls;
pub use wire::MAX_PAYLOAD;

/// This build's oldest and newest wire version.
pub const WIRE_VERSIONS: (u16, u16) = (4, 4);
