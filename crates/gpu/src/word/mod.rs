//! Words that the host and a GPU share: the host sets one once a counter has reached a count, or is called back once a
//! kernel has raised one.
//!
//! A kernel polls a word with `ld.acquire.sys`, or a stream waits for it (`cuStreamWaitValue32`). In the other direction a
//! kernel stores with `st.release.sys`, or a stream by `cuStreamWriteValue32`, and a [`WordWatcher`] looks at the word.
//!
//! For example, a word that is set once rank 1 has raised a counter, whatever this program does meanwhile:
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use weft_fabric::{Communicator, CounterId, Rank, WatchCondition};
//! # use weft_gpu::word::Word;
//! # fn example(communicator: &Communicator, counter: CounterId, word: Arc<Word>) -> weft_gpu::Result<()> {
//! let demand = communicator.demand_progress()?;
//! let raised = WatchCondition::Raised { counter, round: None, expected: vec![(Rank(1), 1)] };
//! communicator.engine().watch(raised, Box::new(move |outcome| {
//!     word.set(if outcome.is_ok() { 1 } else { u32::MAX });
//!     drop(demand);
//! }))?;
//! # Ok(())
//! # }
//! ```
//!
//! - `memory.rs`: a word's memory
//! - `watcher.rs`: the thread that looks at words

mod memory;
mod watcher;

pub use memory::{Word, has_reached};
pub use watcher::{WordCallback, WordWatch, WordWatcher};
