//! Synthetic routings, reference results and fuzz targets, for tests, benchmarks and simulations.
//!
//! - `routing.rs`: synthetic routings and imbalance
//! - `reference.rs`: reference result in float64 with an error bound
//! - `fuzz.rs`: parsers for bytes from outside, as fuzz targets

#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod reference;
pub mod routing;
