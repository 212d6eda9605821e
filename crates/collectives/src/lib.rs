//! Collectives as data: schedules of counted writes, and proofs about them.
//!
//! A [`Schedule`] is the ordered list of operations of each rank: post a counted write, wait for the writes of
//! a peer, add, copy. [`build()`] constructs one by the name of its algorithm, for any number of ranks; a
//! [`Program`] stores one explicitly. The module [`schedule`] defines the semantics of the operations, on which
//! every executor relies. `docs/collectives.md` has the algorithms, their costs, and examples.
//!
//! - `op`: ranks, collectives, spans and operations; [`schedule`]: the trait and its semantics; `program`,
//!   `json`, `listing`: stored schedules, their file format and their printed form
//! - algorithms: [`ring`], [`tree`], [`halving_doubling`], [`hierarchical`], [`direct`], [`pairwise`],
//!   [`recursive`], [`circulant`], [`broadcast`]; their parts: `cube`, `double_tree`, `ordered_sum`, `pipeline`
//! - `algorithm`: names; `any_schedule`: [`build()`] and [`AnySchedule`]
//! - [`verify`](mod@verify): proof of correctness; [`contention`](mod@contention): load of links; `collision`
//! - `placed_hdrm`, `placement`: HDRM for ranks in any order; the order that a network requires
//! - [`tune`](mod@tune): choice of the fastest algorithm on a network; [`tuning`]: by measured times
//! - `executor`: [`Collectives`], which run schedules over the fabric
//! - [`reduction`]: sums, minima and other operations on vectors
//! - [`device`]: collectives between the GPUs of a host
//! - [`messages`]: tagged sends and receives between two ranks
//! - `run_error`: errors of execution

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
/// Loads of links.
pub use contention::contention;
/// Errors.
pub use error::Error;
/// Execution over the fabric.
pub use executor::{
    Call, CallId, Collectives, CollectivesConfig, Executor, GroupRoutes, Scale, SelectionSources,
};
/// Measurement of calls.
pub use executor::{CallTimer, Timed, memory_rates};
/// Printed form of a schedule.
pub use listing::Listing;
/// Parts of a schedule.
pub use op::{Buffer, Collective, MAX_RANKS, Op, OpLocation, Rank, Span};
/// Ranks on a network.
pub use placed_hdrm::PlacedHdrm;
pub use placement::{NetworkSource, Placement};
/// Stored schedule.
pub use program::Program;
/// Operations on vectors.
pub use reduction::{Element, Reduction};
/// Errors of execution.
pub use run_error::RunError;
/// Trait of all schedules.
pub use schedule::Schedule;
/// Choice of the fastest algorithm.
pub use tune::tune;
/// Proof of correctness.
pub use verify::{Proof, verify};

/// Examples of `docs/collectives.md`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/collectives.md")]
pub struct Docs;
