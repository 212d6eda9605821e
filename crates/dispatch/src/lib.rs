//! Query dispatch: inference queries over counted writes.
//!
//! A front end takes queries and sends each to one of several accelerator nodes; every query is answered
//! exactly once, or failed with its cause.
//!
//! | module | contents |
//! |---|---|
//! | [`ledger`] | queries in flight, slots, deadlines, policies: the pure part of a front end |
//! | [`wire`] | handshake, schema of tensors, layout of slots, headers |
//!
//! Private modules:
//!
//! - `error.rs`: [`Error`]

mod error;
pub mod ledger;
pub mod wire;

pub use error::{Error, Result};
pub use ledger::{Failure, Ledger, LedgerConfig, NodeId, Notice, Outcome, Policy, QueryId};
pub use wire::{Agreement, Hello, Role, Schema};
