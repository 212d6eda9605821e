//! Kernel interface: arguments, records and sources.
//!
//! - `arguments.rs`: call arrays, and the argument block for all kernels
//! - `record.rs`: phases and codes in MoE's device records
//! - `family.rs`: MoE as a device operator family, with error texts
//! - `sources.rs`: kernel source files

pub(super) mod arguments;
pub(super) mod family;
pub(super) mod record;
pub(super) mod sources;
