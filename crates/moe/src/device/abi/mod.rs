//! Interface of the kernels: arguments, records and sources.
//!
//! - `arguments.rs`: arrays of calls, and the argument block of all kernels
//! - `record.rs`: phases and codes of MoE's device records
//! - `family.rs`: MoE as a family of device operators, with its error texts
//! - `sources.rs`: source files of the kernels

pub(super) mod arguments;
pub(super) mod family;
pub(super) mod record;
pub(super) mod sources;
