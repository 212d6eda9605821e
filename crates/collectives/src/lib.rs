//! Collectives as data: schedules of counted writes, and proofs about them.
//!
//! A [`Schedule`] says for each rank what it does in which order: post a counted write, wait for those of a
//! peer, add, copy. [`build()`] makes one by the name of an algorithm, for any number of ranks; a [`Program`]
//! is one that was written down. The module [`schedule`] says precisely what the operations mean; whoever runs
//! schedules stands on it. `docs/collectives.md` has the algorithms, their costs, and examples.

#![warn(missing_docs)]

pub mod broadcast;
pub mod build;
pub mod contention;
mod cube;
pub mod direct;
mod error;
pub mod halving_doubling;
pub mod hierarchical;
mod json;
mod op;
pub mod pairwise;
mod pipeline;
mod print;
mod program;
pub mod ring;
pub mod schedule;
pub mod shares;
pub mod tree;
pub mod tune;
pub mod verify;

/// Schedules by name.
pub use build::{Algorithm, AnySchedule, Options, build};
/// Loads of links.
pub use contention::contention;
/// What can go wrong.
pub use error::{At, Error};
/// What a schedule is made of.
pub use op::{Buffer, Collective, Op, Rank, Span};
/// A schedule in print.
pub use print::Print;
/// A schedule that was written down.
pub use program::Program;
/// A schedule as a value.
pub use schedule::Schedule;
/// The fastest algorithm.
pub use tune::tune;
/// What was proved.
pub use verify::{Proof, verify};

/// The examples of `docs/collectives.md`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/collectives.md")]
pub struct Docs;
