//! MLPerf LoadGen bindings: tests for a system under test written in Rust, without Python per query.
//!
//! LoadGen is C++ without a stable binary interface. `weft.loadgen.built` compiles the published sources
//! (<https://github.com/mlcommons/inference>) together with `shim/shim.cpp` into one shared library,
//! which [`LoadGen::load`] loads at run time. A test calls a [`SystemUnderTest`] with samples;
//! [`LoadGen::complete`] returns the answers, from any thread. The results are the LoadGen log files
//! ([`Summary`] reads one).

#![warn(missing_docs)]

mod error;
mod library;
mod run;
mod settings;
mod summary;

/// Errors.
pub use error::{Error, Result};
/// The library.
pub use library::{LoadGen, Response, Sample};
/// Systems under test, sample libraries and tests.
pub use run::{SampleLibrary, SystemUnderTest, Test};
/// Test settings.
pub use settings::{Mode, Scenario, Settings};
/// Test results.
pub use summary::Summary;
