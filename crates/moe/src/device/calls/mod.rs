//! Device all-to-all calls, construction and end.
//!
//! - `all_to_all.rs`: dispatch, combine and counts
//! - `argument_checks.rs`: call argument checks
//! - `connect.rs`: construction on all ranks, and the end
//! - `set_maps.rs`: expert placement changes between rounds

pub(super) mod all_to_all;
mod argument_checks;
mod connect;
mod set_maps;
