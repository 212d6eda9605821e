//! Errors.

use std::path::PathBuf;

/// Result with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reasons why a test does not run, or has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The LoadGen library cannot be loaded.
    #[error("LoadGen at {path}: {problem}; build it with `python -m weft.loadgen`")]
    Library {
        /// File that was tried.
        path: PathBuf,
        /// The loader's words.
        problem: String,
    },
    /// A test file does not exist.
    #[error("{what} {path}: no such file")]
    NoFile {
        /// File purpose, for example "user.conf".
        what: &'static str,
        /// File path.
        path: PathBuf,
    },
    /// LoadGen cannot read a test file, or only a part.
    #[error("{what} {path}: {problem}; pass a text file")]
    Unreadable {
        /// File purpose.
        what: &'static str,
        /// File path.
        path: PathBuf,
        /// I/O error.
        problem: std::io::Error,
    },
    /// A path or name that C cannot take.
    #[error("{what} contains a zero byte")]
    ZeroByte {
        /// Value name.
        what: &'static str,
    },
    /// LoadGen keeps global state, so a process runs one test at a time.
    #[error("another LoadGen test runs in this process: LoadGen runs one at a time")]
    Busy,
    /// The sample library is empty.
    #[error(
        "{total} samples, {performance} of them in memory at a time: LoadGen needs at least one \
         of each, and no more in memory than there are"
    )]
    Samples {
        /// Data set size in samples.
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
        /// Defect in the file.
        problem: String,
    },
}
