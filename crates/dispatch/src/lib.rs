//! Query dispatch: inference queries over counted writes.
//!
//! A front end takes queries and sends each to one of several accelerator nodes; every query is answered exactly
//! once, or failed with its cause. These types carry this:
//!
//! - [`FrontEndService`], [`AcceleratorService`]: threads that drive a front end or an accelerator node; most
//!   programs start here
//! - [`FrontEnd`]: the driver for a front end over all connections
//! - [`Accelerator`]: the driver for an accelerator node, with a [`Backend`] that runs batches
//! - [`Connection`]: one end of a connection between the two, over a pair
//!
//! | module | contents |
//! |---|---|
//! | [`ledger`] | queries in flight, slots, deadlines, policies: a front end without I/O |
//! | [`wire`] | handshake, tensor schema, slot layout, headers |
//! | [`front_end`] | front end driver |
//! | [`accelerator`] | accelerator node driver, batches, backends |
//! | [`service`] | threads that drive both, submissions by several threads |
//!
//! Private modules:
//!
//! - `connection.rs`: [`Connection`]
//! - `peer.rs`: connection peer and departure
//! - `arrivals.rs`: arrivals in slots
//! - `memory.rs`: slot memory
//! - `error.rs`: [`Error`]

pub mod accelerator;
mod arrivals;
mod connection;
mod error;
pub mod front_end;
pub mod ledger;
mod memory;
mod peer;
pub mod service;
pub mod wire;

pub use accelerator::{
    Accelerator, AcceleratorConfig, Backend, Batch, Buckets, Executor, Job, NoOp, Threaded,
};
pub use connection::{Connection, SlotConfig};
pub use error::{Error, Result};
pub use front_end::{Answer, FrontEnd, Input, Report, Tokens};
pub use ledger::{Failure, Ledger, LedgerConfig, NodeId, Notice, Outcome, Policy, QueryId};
pub use service::{
    AcceleratorService, Departure, FrontEndHandle, FrontEndService, Handler, Query, Reports,
    ServiceConfig,
};
pub use wire::{Agreement, Hello, Role, Schema};
