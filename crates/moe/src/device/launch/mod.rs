//! Kernels on a GPU: compiled, sized and launched.
//!
//! - `config.rs`: launch configuration for a call
//! - `grid.rs`: kernels and grids for each operation
//! - `program.rs`: compilation and loading
//! - `launcher.rs`: launches, and counts on the host

pub(super) mod config;
pub(super) mod grid;
pub(super) mod launcher;
pub(super) mod program;
