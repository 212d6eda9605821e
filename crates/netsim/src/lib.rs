//! Flow-level network simulator: transfer times for flows that share links.
//!
//! An [`Engine`] holds directed links with a bandwidth and a latency, paths over them, and flows along the paths. A
//! flow first spends a latency, then shares bandwidth with all moving flows under max-min fairness: a flow's rate can
//! only rise at the cost of one that is no faster. Servers process work first in, first out; timers expire. The engine
//! advances from one instant to the next and returns each instant's events; the caller starts new work in response.
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
//! It has no clock, no randomness and no I/O: the same calls return the same results, bit for bit.
//!
//! - `engine.rs`: flows, services and timers, from one instant to the next
//! - `calendar.rs`: event calendar
//! - `job.rs`: job slots
//! - `network.rs`: links, paths, and flow lists on each link
//! - `solver.rs`: max-min fair rates
//! - `types.rs`: identifiers and reports

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
