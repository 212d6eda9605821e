//! Calls of a device all-to-all, its construction and its end.
//!
//! - `all_to_all.rs`: dispatch, combine and counts
//! - `argument_checks.rs`: checks of a call's arguments
//! - `connect.rs`: construction on all ranks, and the end
//! - `set_maps.rs`: changes of expert placement between rounds

pub(super) mod all_to_all;
mod argument_checks;
mod connect;
mod set_maps;
