//! Services: threads that drive a front end or an accelerator node.
//!
//! A service thread owns a driver and the pairs for its connections. It polls while there is work, then yields the
//! core, then sleeps until a peer writes, a submission arrives or a deadline passes. Other threads call:
//!
//! - [`FrontEndHandle`]: submissions from any number of threads, through a lock-free queue
//! - [`FrontEndService`]: joins, departures, cancels, counts, stop
//! - [`AcceleratorService`]: joins, drain, stop
//!
//! A front end's reports are delivered to a [`Handler`] on the service thread, one call per turn.
//!
//! - `query.rs`: [`Query`]; `handle.rs`: [`FrontEndHandle`]
//! - `handler.rs`: [`Handler`], [`Reports`], [`Departure`]
//! - `front_end.rs`: [`FrontEndService`]; `front_end_thread.rs`: the thread
//! - `accelerator.rs`: [`AcceleratorService`]; `accelerator_thread.rs`: the thread
//! - `submissions.rs`: submissions that wait for a place in the ledger
//! - `config.rs`: [`ServiceConfig`]
//! - `commands.rs`: calls that the thread runs between turns
//! - `sleeper.rs`: spinning, yielding, sleep on descriptors; `visits.rs`: connections that a turn visits

mod accelerator;
mod accelerator_thread;
mod commands;
mod config;
mod front_end;
mod front_end_thread;
mod handle;
mod handler;
mod query;
mod sleeper;
mod submissions;
mod visits;

pub use accelerator::AcceleratorService;
pub use accelerator_thread::AcceleratorState;
pub use config::ServiceConfig;
pub use front_end::FrontEndService;
pub use front_end_thread::NodeState;
pub use handle::{FrontEndHandle, Unsubmitted};
pub use handler::{Departure, Handler, Reports};
pub use query::Query;
