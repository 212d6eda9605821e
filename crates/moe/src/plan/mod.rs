//! Planners: pure functions from expert ids and counts to rows, offsets and sums.
//!
//! - `rows.rs`: equally long rows in plain bytes
//! - `send.rs`: the sender's plan, from expert ids
//! - `record.rs`: a row's metadata record
//! - `metadata.rs`: records for a send plan's rows
//! - `header.rs`: counts that ranks exchange
//! - `receive.rs`: the receiver's plan, from all counts
//! - `packing.rs`: packed writes, when they are used and how large they are
//! - `reduce.rs`: combine arithmetic

pub mod header;
pub mod metadata;
pub(crate) mod packing;
pub(crate) mod receive;
pub(crate) mod record;
pub(crate) mod reduce;
pub(crate) mod rows;
pub(crate) mod send;
