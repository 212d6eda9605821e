//! Planners: pure functions from expert ids and counts to rows, offsets and sums.
//!
//! - `rows.rs`: rows of equal length in plain bytes
//! - `send.rs`: the sender's plan, from expert ids
//! - `record.rs`: metadata record of a row
//! - `metadata.rs`: records of a send plan's rows
//! - `header.rs`: counts that ranks exchange
//! - `receive.rs`: the receiver's plan, from all counts
//! - `packing.rs`: choice and size of packed writes
//! - `reduce.rs`: arithmetic of combine

pub mod header;
pub mod metadata;
pub(crate) mod packing;
pub(crate) mod receive;
pub(crate) mod record;
pub(crate) mod reduce;
pub(crate) mod rows;
pub(crate) mod send;
