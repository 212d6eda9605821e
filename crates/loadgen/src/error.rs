//! Errors.

use std::path::PathBuf;

/// Result with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reasons why a test does not run, or has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library of LoadGen cannot be loaded.
    #[error("LoadGen at {path}: {problem}; build it with `python -m weft.loadgen`")]
    Library {
        /// File that was tried.
        path: PathBuf,
        /// The loader's words.
        problem: String,
    },
    /// A file of the test does not exist.
    #[error("{what} {path}: no such file")]
    NoFile {
        /// Purpose of the file.
        what: &'static str,
        /// Its path.
        path: PathBuf,
    },
    /// A path or name that C cannot take.
    #[error("{what} contains a zero byte")]
    ZeroByte {
        /// Name of the value.
        what: &'static str,
    },
    /// LoadGen keeps its state in global variables: it runs one test at a time in a process.
    #[error("another LoadGen test runs in this process: LoadGen runs one at a time")]
    Busy,
    /// The sample library is empty.
    #[error(
        "{total} samples, {performance} of them in memory at a time: LoadGen needs at least one \
         of each, and no more in memory than there are"
    )]
    Samples {
        /// Samples of the data set.
        total: usize,
        /// Samples that fit into memory.
        performance: usize,
    },
    /// LoadGen refused the test.
    #[error("{0}")]
    Refused(String),
    /// A summary cannot be read.
    #[error("LoadGen's summary {path}: {problem}")]
    Summary {
        /// File.
        path: PathBuf,
        /// Defect of the file.
        problem: String,
    },
}
