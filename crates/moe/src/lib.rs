//! Mixture-of-experts dispatch and combine as patterns of counted writes.
//!
//! A [`Shape`] says what the ranks agreed on and what it takes in memory. Each round, a [`SendPlan`]
//! turns the router's expert ids into rows for each rank, [`Counts`] gathers what all ranks announced,
//! and a [`ReceivePlan`] says where each row lies and which expert finds it where. All three are
//! functions of values: they touch plain bytes and know no network. [`Driver`] is the polled state
//! machine that makes them a protocol over a fabric, and [`AllToAll`] the calls that run it.
//! Between the GPUs of one host kernels do all of this; [`device`] is what they agree on and their twin.
//! `docs/moe.md` tells the protocol.

#![warn(missing_docs)]

mod agreement;
mod all_to_all;
mod areas;
mod connect;
pub mod device;
mod driver;
mod dtype;
mod error;
mod exchange;
mod float8;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod header;
pub mod metadata;
mod missing;
mod outcome;
mod packing;
mod peer;
mod placement;
mod plan;
mod receive;
mod reduce;
pub mod reference;
mod round;
pub mod routing;
mod rows;
mod shape;
mod sizes;
mod token_type;

/// The calls that run it.
pub use all_to_all::AllToAll;
/// The protocol.
pub use driver::Driver;
/// Element types and sums of rows.
pub use dtype::{DType, weighted_sum};
/// What can go wrong.
pub use error::Error;
/// A round's tokens and stages.
pub use exchange::{Input, Stage};
/// 8-bit elements.
pub use float8::Float8;
/// What all ranks announced.
pub use header::Counts;
/// Which rank owns which expert.
pub use placement::Placement;
/// What a rank sends.
pub use plan::SendPlan;
/// What a rank received.
pub use receive::{PADDING, ReceivePlan};
/// Combine's arithmetic.
pub use reduce::{combine, reply};
/// A round's name, and what it received.
pub use round::{Handle, Received, ReceivedScales};
/// Memory by rows, and its names.
pub use rows::{Area, Rows, RowsMut, SourceRows};
/// What ranks agree on.
pub use shape::{CombineMode, Config, Layout, Shape, Weighting};
/// What it takes in memory.
pub use sizes::{Extent, Sizes};
/// What tokens are made of.
pub use token_type::{BlockScaled, ScaleType, TokenType};
