//! Proxy: a host thread that puts for kernels, where a GPU cannot start a transfer by itself.
//!
//! A kernel pushes a 64-byte [`Command`] into a ring in pinned memory, and waits for words that the proxies raise. A
//! command names windows, words and templates by the numbers that all ranks agreed on, and no round, so that a replayed
//! graph finds the next one. `weft/proxy.cuh` has the kernel's side.
//!
//! # Memory order
//! | step | rule |
//! |---|---|
//! | source | all threads store; a bulk store's issuer waits for full completion; block barrier; the lanes that store commands `fence.acq_rel.sys`, then the commands, relaxed |
//! | host | four quarters with acquire, then the post; DRAINED only after the requests have ended |
//! | arrival | completion, flush by the region's reader, lane, driver, then the word with release, and through GDRCopy's mapping between two store fences |
//! | kernel | `ld.acquire.sys` in one thread, block barrier, loads; `fence.proxy.async.global` before bulk loads |
//! | reuse | destination: the consuming kernel's RELEASE, then the credit; source: DRAINED |
//!
//! - `command.rs`, `limits.rs`: commands in a slot, and the limits that admit them
//! - `ring.rs`: the ring's reader, and a writer on the CPU
//! - `words.rs`: the words that kernels wait for
//! - `driver.rs`, `scatter.rs`: the protocol, a polled [`weft_fabric::Driver`]; SCATTER commands
//! - `memory.rs`: memory that kernels and the thread share
//! - `word_store.rs`: homes of the words
//! - `thread.rs`: a running proxy: the thread, errors, closing
//! - `thread_core.rs`: the thread's core
//! - `backlog.rs`: what commands wait for, in errors
//! - `outstanding.rs`, `rounds.rs`: parts and DRAINED commands; rounds toward each peer and from it

mod backlog;
mod command;
mod driver;
mod limits;
mod memory;
mod outstanding;
mod ring;
mod rounds;
mod scatter;
mod thread;
mod thread_core;
mod word_store;
mod words;

pub use backlog::Backlog;
pub use command::{
    Command, CommandError, CommandFields, HOLD, Kind, PAYLOAD_WORDS, Payloads, Place, Problem,
    QUARTERS, SlotLayout, Target, c_header,
};
pub use driver::{ProxyConfig, ProxyDriver, Window, WordConfig};
pub use limits::{Limits, MAX_WORDS, ScatterWindows, Template, TemplateMember};
pub use ring::{MappedRing, RingError, RingMemory, RingReader, RingWriter, SLOT_WORDS, place_of};
pub use rounds::MAX_ROUNDS;
pub use thread::{Idle, MAX_SLOTS, Proxy, ProxyGroup, ProxyOptions};
pub use thread_core::{CoreClaim, ProxyCore};
pub(crate) use word_store::Pages;
pub use word_store::WordHome;
pub use words::{WordMemory, WordUpdate, Words};
