//! Collectives as data: counted-write schedules, and proofs about them.
//!
//! A [`Schedule`] lists each rank's operations in order: post a counted write, wait for a peer's writes, add, copy.
//! [`build()`] constructs one by algorithm name, for any rank count; a [`Program`] stores one explicitly. The module
//! [`schedule`] defines the operation semantics, on which every executor relies. `docs/collectives.md` has the
//! algorithms with costs and examples.
//!
//! - `op`: ranks, collectives, spans and operations; [`schedule`]: the trait and the semantics; `program`, `json`,
//!   `listing`: stored schedules, file format and printed form
//! - algorithms: [`ring`], [`tree`], [`halving_doubling`], [`hierarchical`], [`direct`], [`pairwise`], [`recursive`],
//!   [`circulant`], [`broadcast`]; parts: `cube`, `double_tree`, `ordered_sum`, `pipeline`
//! - `algorithm`: names; `any_schedule`: [`build()`] and [`AnySchedule`]
//! - [`verify`](mod@verify): correctness proof; [`contention`](mod@contention): link loads; `collision`
//! - `placed_hdrm`, `placement`: HDRM for ranks in any order; the order that a network requires
//! - [`tune`](mod@tune): selects the fastest algorithm on a network; [`tuning`]: by measured times
//! - `executor`: [`Collectives`], which run schedules over the fabric
//! - [`reduction`]: sums, minima and other operations on vectors
//! - [`device`]: collectives between the GPUs on a host
//! - [`messages`]: tagged sends and receives between two ranks
//! - `run_error`: execution errors

#![warn(missing_docs)]

mod algorithm;
mod any_schedule;
pub mod broadcast;
pub mod circulant;
mod collision;
pub mod contention;
mod cube;
pub mod device;
pub mod direct;
mod double_tree;
mod error;
mod executor;
pub mod halving_doubling;
pub mod hierarchical;
mod json;
mod listing;
pub mod messages;
mod op;
mod ordered_sum;
pub mod pairwise;
mod pipeline;
mod placed_hdrm;
mod placement;
mod program;
pub mod recursive;
pub mod reduction;
pub mod ring;
mod run_error;
pub mod schedule;
pub mod tree;
pub mod tune;
pub mod tuning;
pub mod verify;

/// Schedules by name.
pub use algorithm::{Algorithm, Options};
pub use any_schedule::{AnySchedule, build};
/// Link loads.
pub use contention::contention;
/// Errors.
pub use error::Error;
/// Execution over the fabric.
pub use executor::{
    Call, CallId, Collectives, CollectivesConfig, Executor, GroupRoutes, Scale, SelectionSources,
};
/// Call measurements.
pub use executor::{CallTimer, Timed, memory_rates};
/// Printed schedule form.
pub use listing::Listing;
/// Schedule parts.
pub use op::{Buffer, Collective, MAX_RANKS, Op, OpLocation, Rank, Span};
/// Ranks on a network.
pub use placed_hdrm::PlacedHdrm;
pub use placement::{NetworkSource, Placement};
/// Stored schedule.
pub use program::Program;
/// Operations on vectors.
pub use reduction::{Element, Reduction};
/// Execution errors.
pub use run_error::RunError;
/// Trait for all schedules.
pub use schedule::Schedule;
/// Selects the fastest algorithm.
pub use tune::tune;
/// Correctness proof.
pub use verify::{Proof, verify};

/// Examples from `docs/collectives.md`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/collectives.md")]
pub struct Docs;
