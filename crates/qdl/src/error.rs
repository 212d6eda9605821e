//! Errors in tests and nodes, one variant per cause.

use std::path::PathBuf;

/// Reasons why a test or a node does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Value out of range.
    #[error("{what} {value}: expected {expected}")]
    Invalid {
        /// Value name.
        what: &'static str,
        /// The value.
        value: String,
        /// The accepted values.
        expected: String,
    },
    /// Two nodes have one name: the rules demand unique names.
    #[error(
        "node {address} has the name {name:?}, as another node has; start one with another --name"
    )]
    SameName {
        /// Address of the second node.
        address: String,
        /// Shared name.
        name: String,
    },
    /// A node did not return the expected name over the connection.
    #[error("node {address}: its reply to the query for its name is {problem}")]
    Name {
        /// Node address.
        address: String,
        /// Defect in the reply.
        problem: String,
    },
    /// A sample file does not fit.
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
        /// Node address.
        address: String,
        /// Cause.
        source: weft_dispatch::Error,
    },
    /// Dispatch error.
    #[error(transparent)]
    Dispatch(#[from] weft_dispatch::Error),
    /// Fabric error.
    #[error(transparent)]
    Fabric(#[from] weft_fabric::Error),
    /// LoadGen error.
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

/// Result in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<weft_control::Error> for Error {
    fn from(error: weft_control::Error) -> Error {
        Error::Fabric(error.into())
    }
}
