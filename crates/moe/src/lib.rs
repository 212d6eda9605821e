//! Mixture-of-experts dispatch and combine as patterns of counted writes.
//!
//! A [`Shape`] holds the configuration that the ranks agreed on, with the sizes that follow from it. In each
//! round a [`SendPlan`] turns the router's expert ids into rows for each rank, [`RoundCounts`] gathers the
//! counts of all ranks, and a [`ReceivePlan`] holds the slot and the expert positions of each received row.
//! These three are pure functions of values. [`Driver`] is the polled state machine that runs them as a
//! protocol over a fabric, and [`AllToAll`] has the blocking calls. Between the GPUs of one host, kernels
//! implement the same protocol: see [`device`]. `docs/moe.md` describes the protocol.

#![warn(missing_docs)]

mod area;
pub mod device;
mod elements;
mod error;
mod plan;
mod protocol;
mod shape;
mod stage;
mod testing;

/// Names of memory areas and arrays.
pub use area::Area;
/// Element types and sums of rows.
pub use elements::dtype::{DType, weighted_sum};
/// 8-bit elements.
pub use elements::float8::Float8;
/// Elements and scales of tokens.
pub use elements::token_type::{BlockScaled, ScaleType, TokenType};
/// Errors.
pub use error::Error;
/// Counts announced by all ranks.
pub use plan::header::RoundCounts;
/// Received rows of a round.
pub use plan::receive::{PADDING, ReceivePlan};
/// Arithmetic of combine.
pub use plan::reduce::{combine, reply};
/// Rows of memory.
pub use plan::rows::{Rows, RowsMut, SourceRows};
/// Rows that a rank sends.
pub use plan::send::SendPlan;
/// Wire formats of counts and of rows' metadata.
pub use plan::{header, metadata};
/// Blocking calls.
pub use protocol::all_to_all::AllToAll;
/// Tokens of a round.
pub use protocol::channel::TokenInput;
/// The protocol, as a polled driver.
pub use protocol::driver::Driver;
/// Handle of a round, and its received tokens.
pub use protocol::round::{ReceivedScales, ReceivedTokens, RoundHandle};
/// A checked configuration with its sizes.
pub use shape::Shape;
/// Configuration of an all-to-all.
pub use shape::config::{CombineMode, Config, Layout, Weighting};
/// Replicas of experts.
pub use shape::expert_map::{ExpertMap, MOST_REPLICAS};
/// Owner rank of each expert.
pub use shape::placement::Placement;
/// Rows and bytes of each area.
pub use shape::sizes::{Extent, Sizes};
/// Stage of a round.
pub use stage::Stage;
/// Fuzz targets.
#[cfg(any(test, feature = "fuzz"))]
pub use testing::fuzz;
/// Reference results and synthetic routings.
pub use testing::{reference, routing};
