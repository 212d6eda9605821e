//! Synthetic routings, reference results and fuzz targets, for tests, benchmarks and simulations.
//!
//! - `routing.rs`: synthetic routings and their imbalance
//! - `reference.rs`: reference result in float64 with its error bound
//! - `fuzz.rs`: parsers of bytes from outside, as fuzz targets

#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod reference;
pub mod routing;
