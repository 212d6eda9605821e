//! Memory that the GPUs of one host share, the kernels that use it, and what they tell the host.
//!
//! A [`Domain`] is what all device operators of a communicator stand on: a symmetric heap with an allocator, the
//! table that kernels read, one way in which failures become known, an account of what may be resident at
//! once.
//!
//! A [`Heap`] is one allocation of equal size for each rank, mapped by all of them: a kernel stores
//! straight into a peer's part. [`jit`] compiles kernels for the shapes at hand and keeps them; their
//! sources come from the crates that have them, the headers for all of them from [`kernels`]. A kernel
//! that gives up waiting says so in a [`Watch`], and ends when the host asks for it there.
//!
//! Without a GPU everything is here all the same: [`Place::Twin`] is a heap on the CPU that several
//! processes share, with the same addresses and areas, in which the kernels' twins run.
//!
//! - [`domain`]: what operators stand on
//! - [`heap`]: allocating, offering, connecting, and who may die when
//! - [`jit`]: requests, the cache, compiling ahead of time
//! - [`watch`]: records and the abort word
//! - [`kernels`]: the device headers
//! - [`mod@layout`]: memory that the host and kernels share, declared once

pub mod domain;
pub mod error;
pub mod heap;
pub mod jit;
pub mod kernels;
pub mod layout;
pub mod watch;

pub use domain::{Block, Domain};
pub use error::{Error, Result};
pub use heap::{Heap, HeapBuilder, Memory, Place, Window};
pub use watch::{Code, Families, Family, Phase, Record, Report, Severity, Watch};
