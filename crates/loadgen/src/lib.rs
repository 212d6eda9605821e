//! MLPerf's LoadGen as a library of Rust: tests of a system under test that is written in Rust, without
//! Python per query.
//!
//! LoadGen is C++ without a stable binary interface. `weft.loadgen.built` compiles its published
//! sources together with `shim/shim.cpp` into one shared library, which [`LoadGen::load`] loads at run
//! time. A test calls a [`SystemUnderTest`] with samples; [`LoadGen::complete`] gives their answers, from
//! any thread. The results are the log files of LoadGen ([`Summary`] reads one).

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
/// Settings of a test.
pub use settings::{Mode, Scenario, Settings};
/// Results of a test.
pub use summary::Summary;
