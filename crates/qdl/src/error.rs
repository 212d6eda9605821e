//! Errors of tests and nodes, one variant per cause.

use std::path::PathBuf;

/// Reasons why a test or a node does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value outside of its range.
    #[error("{what} {value}: expected {expected}")]
    Invalid {
        /// Name of the value.
        what: &'static str,
        /// The value.
        value: String,
        /// The accepted values.
        expected: String,
    },
    /// Two nodes of one name: the rules want unique ones.
    #[error(
        "node {address} has the name {name:?}, as another node has; start one with another --name"
    )]
    SameName {
        /// Address of the second node.
        address: String,
        /// Name of both.
        name: String,
    },
    /// A node whose name does not come back over its connection.
    #[error("node {address}: its reply to the query for its name is {problem}")]
    Name {
        /// Address of the node.
        address: String,
        /// Defect of the reply.
        problem: String,
    },
    /// A file of samples that does not fit.
    #[error("samples {path}: {problem}")]
    Samples {
        /// File.
        path: PathBuf,
        /// Defect.
        problem: String,
    },
    /// A node cannot be reached, or refuses.
    #[error("node {address}: {source}")]
    Node {
        /// Address of the node.
        address: String,
        /// Cause.
        source: weft_dispatch::Error,
    },
    /// Error of dispatch.
    #[error(transparent)]
    Dispatch(#[from] weft_dispatch::Error),
    /// Error of the fabric.
    #[error(transparent)]
    Fabric(#[from] weft_fabric::Error),
    /// Error of LoadGen.
    #[error(transparent)]
    LoadGen(#[from] weft_loadgen::Error),
    /// A description that is not the expected JSON.
    #[error("description of a {what}: {source}")]
    Json {
        /// Described thing.
        what: &'static str,
        /// Defect.
        source: serde_json::Error,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<weft_control::Error> for Error {
    fn from(error: weft_control::Error) -> Error {
        Error::Fabric(error.into())
    }
}
