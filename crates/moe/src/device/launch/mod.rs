//! Kernels on a GPU: compiled, sized and launched.
//!
//! - `config.rs`: launch configuration of a call
//! - `grid.rs`: kernels of each operation and their grids
//! - `program.rs`: compilation and loading
//! - `launcher.rs`: launches, and counts on the host

pub(super) mod config;
pub(super) mod grid;
pub(super) mod launcher;
pub(super) mod program;
