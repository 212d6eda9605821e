//! Counted one-sided writes over any network.
//!
//! Between hosts a rank does exactly one thing to another: it writes bytes into memory that the
//! other has granted, and raises a counter there. [`Engine`] is one rank's end of a group that does
//! so; a [`Device`] is a way of reaching peers, which groups share, and a [`Link`] one group's use of it;
//! [`Communicator`] puts an engine on top of the control plane, which is what most programs start with.
//!
//! - [`Engine::write`], [`Engine::scatter`], [`Engine::signal`], [`Engine::barrier`]: requests
//! - [`Engine::wait`], [`Engine::count`], [`Engine::credit`]: counters, their rounds and credits
//! - [`Engine::poll`], [`Driver`]: the same without blocking
//! - [`providers`]: shm, copy, tcp, sim; hostile, a wrapper for tests
//! - [`pair`]: groups of two, made between any two processes at run time
//! - [`local`]: ranks of one host: meeting, passing descriptors, mapped memory
//! - [`RegistrationCache`], [`LentCache`]: registrations with NICs, once for each allocation

pub mod atomics;
pub mod clock;
pub mod communicator;
pub mod descriptor;
pub mod device;
pub mod driver;
pub mod engine;
pub mod error;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod group_control;
pub mod inbox;
pub mod lane_table;
pub mod lanes;
pub mod link;
pub mod local;
pub mod memory;
pub mod model;
pub mod pair;
pub mod parts;
pub mod poison;
pub mod providers;
pub mod registration;
pub mod registry;
pub mod request;
pub mod shared;
mod shared_driver;
pub mod statistics;
mod strangers;
mod timer;
pub mod trace;
pub mod types;
pub mod unconsumed;
pub mod wait;
pub mod waiters;

pub use communicator::Communicator;
pub use device::Device;
pub use driver::{Driver, Event, Requests};
pub use engine::{
    CounterConfig, Engine, EngineConfig, MemberWrite, PeerGroup, PeerWrite, Raised, Region,
    RemoteRegion, Route, WeakRegion,
};
pub use error::{Error, Missing, Result};
pub use link::{Link, RouteRule};
pub use local::WaitLimit;
pub use memory::{DmaBuf, Memory, MemoryId, Place, Placement};
pub use parts::PartRule;
pub use registration::{IdleLimits, LentCache, Registration, RegistrationCache};
pub use shared_driver::SharedDriver;
pub use types::{
    Class, CounterId, Generation, Lane, LaneId, Page, ProviderKind, RegionKey, RequestId, Time,
};
pub use wait::{Host, Waiter};
pub use weft_control::{Cause, Poison, Rank, bytes, random};
