//! Symmetric memory between GPUs on one host, run-time kernel compilation, and failure records from kernels to the
//! host.
//!
//! A [`Domain`] is the base for all device operators on a communicator: a symmetric heap with an allocator, the
//! table that kernels read, failure detection, and the resident block budget.
//!
//! A [`Heap`] has an equal-sized allocation on each rank, mapped by all ranks: a kernel stores directly into a
//! peer's part. [`jit`] compiles kernels for the present shapes and caches them; sources come from the operator
//! crates, common headers from [`kernels`]. A kernel whose wait expires leaves a record in a [`Watch`], and ends
//! when the host sets the abort word there.
//!
//! All this also works without a GPU: [`MemoryLocation::Twin`] is a CPU heap that several processes share, with the
//! same addresses and areas, for kernels' CPU twins.
//!
//! - [`domain`]: the operator base
//! - [`heap`]: symmetric memory allocation, exchange, mapping and lifetime
//! - [`jit`]: requests, cache, ahead-of-time compilation
//! - [`watch`]: records and the abort word
//! - [`kernels`]: the device headers
//! - [`proxy`]: commands that kernels push to a host thread, for peers on other hosts
//! - [`word`]: words that the host and a GPU share
//! - [`table`]: the ABI between host and kernels
//! - [`mod@layout`]: structs shared by host and kernels, declared once
//! - [`user_kernels`]: context and phases for the user's Triton kernels
//! - [`twin`], [`raw_memory`]: common CPU twin parts: waits, records, memory by address

pub mod domain;
pub mod error;
#[cfg(test)]
#[path = "../../cuda/tests/common/gdrapi.rs"]
mod gdrapi;
pub mod heap;
pub mod jit;
pub mod kernels;
pub mod layout;
mod phase;
pub mod proxy;
pub mod raw_memory;
pub mod table;
pub mod twin;
pub mod user_kernels;
pub mod watch;
pub mod word;

pub use domain::{Block, Domain};
pub use error::{Error, Result};
pub use heap::{Heap, HeapBuilder, HostView, MemoryKind, MemoryLocation, UserMemory};
pub use phase::{Phase, Report};
pub use watch::{Code, Families, Family, Record, Severity, Watch};
