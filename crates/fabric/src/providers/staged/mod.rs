//! Staging wrapper: GPU memory over links that do not reach it.
//!
//! A part with a page in a GPU at either end is gathered into a slot in host memory here, travels as one
//! write with a header in front into a slot at the peer, and is copied from there. Parts with all pages in
//! host memory pass through to the inner link. Copy engines move the bytes between GPUs and slots
//! ([`super::copy::CopyEngine`]; in tests the twin).
//!
//! ```text
//! post       copy engine: pages -> slot      Full without a free slot
//! poll       event complete: slot -> the peer's slot, over the inner link; raises the slot's lane there
//! peer       lane raised: checks the header, copy engine: slot -> pages
//! peer       event complete: raises the part's lane; frees the slot, by a raise here
//! ```
//!
//! **Lanes.** Both ends issue lanes to each other for the wrapper: one for each slot, one for freed slots.
//! The receiver raises the part's lane itself, as a link does on an arrival. Where peers raise lanes by
//! stores ([`crate::Link::peers_raise`]: shm), a lane has one agent, the sender: it raises the part's lane once
//! the slot is freed.
//!
//! **Checks.** A header is copied out of the slot once, and checked before any byte is written: the turn,
//! and each page against the ranges granted to that peer. A violation costs the peer the connection
//! ([`StagedCounters`]). A lane that the peer does not hold is dropped and counted by the lane table.
//!
//! **Completion.** A part ends when the inner link has taken the slot's bytes, so that a request that is
//! done leaves no bytes in this process; over shm, when the peer has freed the slot. The source is read only
//! until the bytes are in the slot.
//!
//! Copies cannot be cancelled. [`crate::Link::fence`] waits for them up to a time limit, as the copy provider
//! does; beyond it the memory that they may touch is kept until the process ends.
//!
//! **Routes.** Both route ends are wrapped, or neither: a wrapped address does not reach an unwrapped one. The
//! addresses say whether the route has slots ([`StagedMode`]). A link without such a route steps aside
//! ([`crate::Link::take_inner`]); one with such routes passes calls through until GPU memory is registered or
//! imported, or a slot was filled. The ends may have different copy engines.
//!
//! - `wire.rs`: addresses, introductions, grants and headers as bytes
//! - `slots.rs`: which slots are free, filled and copied
//! - `peer.rs`: one peer's slots, lanes, grants and copies
//! - `send.rs`, `receive.rs`: a part's two ends
//! - `mode.rs`, `route.rs`: which routes have slots; part rules
//! - `config.rs`, `device.rs`, `link.rs`: configuration; the device; one group's use of it

mod config;
mod device;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod link;
mod mode;
mod peer;
mod receive;
mod route;
mod send;
mod slots;
#[cfg(all(test, not(miri)))]
mod tests;
mod wire;

pub use config::{StagedConfig, StagedCounters};
pub use device::StagedDevice;
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::wire as fuzz_wire;
pub use mode::{StagedMode, Staging, has_gpus};
pub(crate) use wire::HEADER_ROOM;
