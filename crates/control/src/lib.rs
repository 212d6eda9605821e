//! The control plane of Weft: how ranks find each other, notice a loss and agree on who is left.
//!
//! [`Config::from_env`] reads what a launcher has set; [`Control::connect`] joins the group and
//! returns the handle everything else goes through: a small [`Control::all_gather`] or
//! [`Control::exchange`] of descriptors, [`Control::send`] to one rank, [`Control::poison`] to fail
//! the group everywhere, and [`Control::reform`] to go on with the survivors. No bulk data travels
//! here.
//!
//! Read next: [`config`] (where rank, size and address come from), `handshake` (who may join),
//! `core` (what the ranks tell each other, without sockets), `agreement` (who survives),
//! [`pair`] (the control connection of a group of two),
//! `mesh` (the one background thread and its sockets), `bootstrap` (how the mesh comes to be),
//! [`fork_guard`] (why a forked child keeps no connection open).
#![warn(missing_docs)]

mod agreement;
mod bootstrap;
pub mod bytes;
mod clock;
pub mod config;
mod connecting;
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
mod member;
mod mesh;
mod message;
mod nodelist;
mod operation;
pub mod pair;
mod poison;
pub mod random;
mod reception;
mod resolve;
mod secret;
mod wire;

pub use clock::monotonic_ns;
pub use config::{Config, Interrupt, Overrides};
pub use control::{Control, local_world};
pub use error::{Error, Result};
pub use host::HostIdentity;
pub use member::{Member, PeerStatus, Rank};
pub use operation::Operation;
pub use poison::{Cause, Poison};
pub use secret::Secret;
pub use wire::MAX_PAYLOAD;

/// The oldest and newest wire version this build speaks.
pub const WIRE_VERSIONS: (u16, u16) = (3, 3);
