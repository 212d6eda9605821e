//! Blocking calls: loops around [`Engine::poll`].
//!
//! A wait spins up to a spin deadline, and yields the core meanwhile if ranks share cores; then it parks:
//! on the doorbell word if only peers' stores can wake it, on descriptors if a link needs polls. Every
//! wait has a deadline. The loops run over an engine with one owner and over one that threads share
//! (`shared_engine.rs`).
//!
//! - `engine.rs`: blocking calls on an engine with one owner
//! - `conditions.rs`, `barrier.rs`: conditions that a thread waits for; barrier across all ranks
//! - `run.rs`: wait loop
//! - `access.rs`, `options.rs`: a waiting thread's access to the engine; wait options

mod access;
mod barrier;
mod conditions;
mod engine;
mod options;
mod run;

pub use access::EngineAccess;
pub(crate) use barrier::barrier;
pub(crate) use conditions::{wait, wait_for_credit, wait_for_request, wait_for_totals};
pub use options::WaitOptions;
pub(crate) use run::run;
