//! Query dispatch library (QDL) of MLPerf Inference's Network division: LoadGen on a front end, inference on
//! accelerator nodes.
//!
//! LoadGen calls [`NetworkSystem`], whose queries travel by `weft_dispatch` to every [`Node`]. No Python is on the
//! way of a query, unless the model of a node is a Python callable.
//!
//! - [`Node`]: an accelerator node that accepts front ends at an address
//! - [`run`]: a test of LoadGen, by a [`Spec`]
//!
//! | module | contents |
//! |---|---|
//! | [`spec`] | description of a test |
//! | [`test`] | run of a test, its outcome |
//! | [`node`] | accelerator node: listener, handshakes |
//! | [`node_spec`] | description of a node |
//! | [`lane`] | buffers of a batch on a device, and the copies between them and slots |
//! | [`ask`] | queries and answers without LoadGen |
//! | [`model`] | models without a framework: no-op, checksum, time of work |
//! | [`network`] | connections to nodes and their names |
//! | [`system`] | LoadGen's system under test over the network |
//! | [`in_process`] | LoadGen's system under test in this process |
//! | [`samples`] | LoadGen's sample library, in registered memory |
//!
//! Private modules:
//!
//! - `completions.rs`: answers collected for one call of LoadGen
//! - `counts.rs`: [`Counts`] of a running test or node
//! - `handler.rs`: answers on their way to LoadGen
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
