//! Simulated network: many ranks in one process, under virtual time and a seed.
//!
//! [`World`] is the network with all faults; [`World::device`] is one rank's device, for an
//! [`crate::Engine`]; [`Cluster`] creates engines, connects them and runs a driver on each. The simulator
//! reads no clock and starts no thread: [`World::step`] advances to the next event, so that equal seeds
//! give equal runs. A run with waiting ranks and an empty calendar is a deadlock
//! ([`RunError::Deadlock`]).
//!
//! The world also checks the engines. Destination bytes are random from the time a part is posted toward
//! them until it lands, and again after they are credited, so that a reader of uncounted bytes gets
//! garbage. Each broken rule is recorded as a [`Violation`].
//!
//! - `config.rs`, `world.rs`: configuration and faults; the public world
//! - `state.rs`: world state: calendar, links, parts
//! - `part.rs`, `part_record.rs`: a part from post to completion, and the record for it
//! - `ranks.rs`: ranks that join, pause, die and fence each other
//! - `violations.rs`: counted write rules, and the ledger of claimed bytes
//! - `link.rs`: a rank's [`crate::Device`] and [`crate::Link`]
//! - `cluster.rs`: engines and drivers over a world

mod cluster;
mod config;
mod link;
mod part;
mod part_record;
mod ranks;
mod state;
mod violations;
mod world;

pub use cluster::{Cluster, Outcome, RunError, run_groups};
pub use violations::{Violation, ViolationKind};

pub use config::{Faults, Pause, WorldConfig};
pub use world::World;
