//! Symmetric memory of the GPUs of one host, run-time compilation of the kernels that use it, and failure records
//! from kernels to the host.
//!
//! A [`Domain`] is the base of all device operators of a communicator: a symmetric heap with an allocator, the
//! table that kernels read, the detection of failures, and the budget of resident blocks.
//!
//! A [`Heap`] is one allocation of equal size for each rank, mapped by all of them: a kernel stores directly into a
//! peer's part. [`jit`] compiles kernels for the present shapes and caches them; their sources come from the crates
//! of the operators, the common headers from [`kernels`]. A kernel whose wait expires leaves a record in a
//! [`Watch`], and ends when the host sets the abort word there.
//!
//! All of this also works without a GPU: [`MemoryLocation::Twin`] is a heap on the CPU that several
//! processes share, with the same addresses and areas, for the CPU twins of kernels.
//!
//! - [`domain`]: the base of operators
//! - [`heap`]: allocation, exchange, mapping and lifetime of symmetric memory
//! - [`jit`]: requests, cache, compilation ahead of time
//! - [`watch`]: records and the abort word
//! - [`kernels`]: the device headers
//! - [`table`]: the ABI between host and kernels
//! - [`mod@layout`]: structs shared by host and kernels, declared once
//! - [`user_kernels`]: context and phases of Triton kernels of the user
//! - [`twin`], [`raw_memory`]: common parts of CPU twins: waits, records, memory by address

pub mod domain;
pub mod error;
pub mod heap;
pub mod jit;
pub mod kernels;
pub mod layout;
mod phase;
pub mod raw_memory;
pub mod table;
pub mod twin;
pub mod user_kernels;
pub mod watch;

pub use domain::{Block, Domain};
pub use error::{Error, Result};
pub use heap::{Heap, HeapBuilder, HostView, MemoryKind, MemoryLocation, UserMemory};
pub use phase::{Phase, Report};
pub use watch::{Code, Families, Family, Record, Severity, Watch};
