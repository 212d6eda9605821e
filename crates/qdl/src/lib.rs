//! Query dispatch library (QDL) for MLPerf Inference's Network division: LoadGen on a front end, inference on
//! accelerator nodes.
//!
//! LoadGen calls [`NetworkSystem`], whose queries travel by `weft_dispatch` to every [`Node`]. Queries pass
//! through no Python, unless the node's model is a Python callable.
//!
//! - [`Node`]: an accelerator node that accepts front ends at an address
//! - [`run`]: a LoadGen test, described by a [`Spec`]
//!
//! | module | contents |
//! |---|---|
//! | [`spec`] | test description |
//! | [`test`] | test run, outcome |
//! | [`node`] | accelerator node: listener, handshakes |
//! | [`node_spec`] | node description |
//! | [`lane`] | batch buffers on a device, and copies to and from slots |
//! | [`ask`] | queries and answers without LoadGen |
//! | [`model`] | models without a framework: no-op, checksum, CPU time |
//! | [`network`] | node connections and names |
//! | [`system`] | LoadGen's system under test over the network |
//! | [`in_process`] | LoadGen's system under test in this process |
//! | [`samples`] | LoadGen's sample library, in registered memory |
//!
//! Private modules:
//!
//! - `completions.rs`: answers collected for one LoadGen call
//! - `counts.rs`: [`Counts`] for a running test or node
//! - `handler.rs`: answers on the way to LoadGen
//! - `lent.rs`: samples whose memory a node may still read
//! - `kept.rs`: answers kept against the rules, for a proof that an audit detects them
//! - `error.rs`: [`Error`]

#![warn(missing_docs)]

pub mod ask;
mod completions;
mod counts;
mod error;
mod handler;
pub mod in_process;
mod kept;
pub mod lane;
mod lent;
pub mod model;
pub mod network;
pub mod node;
pub mod node_spec;
pub mod samples;
pub mod spec;
pub mod system;
pub mod test;

pub use counts::{Counts, Departure, Snapshot};
pub use error::{Error, Result};
pub use in_process::InProcess;
pub use lane::Lane;
pub use model::{Model, ModelBackend, ModelKind};
pub use node::{Node, NodeConfig};
pub use node_spec::NodeSpec;
pub use spec::Spec;
pub use system::{NetworkSystem, SystemConfig};
pub use test::{Outcome, run};
