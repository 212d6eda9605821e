//! Mixture-of-experts dispatch and combine as counted-write patterns.
//!
//! A [`Shape`] holds the configuration that the ranks agreed on, with the derived sizes. In each round a
//! [`SendPlan`] turns the router's expert ids into rows for each rank, [`RoundCounts`] gathers all ranks'
//! counts, and a [`ReceivePlan`] holds each received row's slot and expert positions. These three are pure
//! functions. [`Driver`] is the polled state machine that runs them as a protocol over a fabric, and
//! [`AllToAll`] has the blocking calls. Between GPUs on one host, kernels implement the same protocol: see
//! [`device`]. `docs/moe.md` describes the protocol.

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

/// Memory area and array names.
pub use area::Area;
/// Element types and row sums.
pub use elements::dtype::{DType, weighted_sum};
/// 8-bit elements.
pub use elements::float8::Float8;
/// Token elements and scales.
pub use elements::token_type::{BlockScaled, ScaleType, TokenType};
/// Errors.
pub use error::Error;
/// Counts announced by all ranks.
pub use plan::header::RoundCounts;
/// Rows received in a round.
pub use plan::receive::{PADDING, ReceivePlan};
/// Combine arithmetic.
pub use plan::reduce::{combine, reply};
/// Rows in memory.
pub use plan::rows::{Rows, RowsMut, SourceRows};
/// Rows that a rank sends.
pub use plan::send::SendPlan;
/// Wire formats for counts and row metadata.
pub use plan::{header, metadata};
/// Blocking calls.
pub use protocol::all_to_all::AllToAll;
/// Tokens for a round.
pub use protocol::channel::TokenInput;
/// The protocol, as a polled driver.
pub use protocol::driver::Driver;
/// Round handle, and received tokens.
pub use protocol::round::{ReceivedScales, ReceivedTokens, RoundHandle};
/// A checked configuration with the derived sizes.
pub use shape::Shape;
/// All-to-all configuration.
pub use shape::config::{CombineMode, Config, Layout, Weighting};
/// Expert replicas.
pub use shape::expert_map::{ExpertMap, MOST_REPLICAS};
/// Owner rank for each expert.
pub use shape::placement::Placement;
/// Rows and bytes in each area.
pub use shape::sizes::{Extent, Sizes};
/// Round stage.
pub use stage::Stage;
/// Fuzz targets.
#[cfg(any(test, feature = "fuzz"))]
pub use testing::fuzz;
/// Reference results and synthetic routings.
pub use testing::{reference, routing};
