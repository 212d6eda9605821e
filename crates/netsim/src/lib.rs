//! A network at the level of flows: how long bytes take when they share links.
//!
//! An [`Engine`] knows directed links with a bandwidth and a latency, paths over them, and flows along
//! the paths. A flow first spends its latency, then shares bandwidth with all flows that are in that
//! phase, in the max-min fair way: nobody can have more without somebody who has no more getting less.
//! Servers take work first in, first out, and timers only wait. The engine moves from one instant to
//! the next and says what has ended; what follows from that is its caller's business.
//!
//! ```
//! use weft_netsim::{Engine, Link, LinkId, Tag};
//!
//! let links = [Link { bandwidth: 1e9, latency: 1e-6 }, Link { bandwidth: 1e9, latency: 1e-6 }];
//! let mut engine = Engine::new(&links)?;
//! let near = engine.add_path(&[LinkId(0)])?;
//! let far = engine.add_path(&[LinkId(0), LinkId(1)])?;
//! engine.start_flow(near, 1_000_000, 0.0, Tag(1))?;
//! engine.start_flow(far, 1_000_000, 0.0, Tag(2))?;
//! let mut events = Vec::new();
//! while let Some(time) = engine.next(&mut events)? {
//!     for event in events.drain(..) {
//!         println!("{time} s: flow {} has arrived", event.tag.0);
//!     }
//! }
//! # Ok::<(), weft_netsim::Error>(())
//! ```
//!
//! It has no clock, no randomness and no I/O: the same calls give the same answers, bit for bit.

mod calendar;
mod engine;
mod error;
mod job;
mod network;
mod solver;
mod types;

pub use engine::Engine;
pub use error::{Error, Result};
pub use types::{Event, FlowHandle, Link, LinkId, LinkUsage, PathId, ServerId, Tag};
