//! Counted one-sided writes over any network.
//!
//! A rank writes bytes into memory that a peer has granted, and raises a counter there once all bytes are
//! visible. Three types carry this:
//!
//! - [`Communicator`]: a group of ranks over the control plane, where most programs start. Any thread may
//!   call it.
//! - [`Engine`]: one rank's state in one group generation: regions, counters, requests. It has no thread
//!   and no clock.
//! - [`Device`]: a way to reach peers, shared by all groups in a process; a [`Link`] is one group's use
//!   of a device.
//!
//! In each round of a counter, the source writes ([`Engine::write`], [`Engine::scatter`],
//! [`Engine::signal`]); the owner waits for the arrivals ([`Engine::wait`], [`Engine::count`]) and
//! returns a credit ([`Engine::credit`]). [`Engine::poll`] and [`Driver`] do the same without blocking.
//!
//! | module | contents |
//! |---|---|
//! | [`link`] | the provider interface: posts, completions, routes |
//! | [`providers`] | shm, copy, verbs, ofi, tcp and sim; `staged`, a wrapper for GPU memory; `hostile`, one for tests |
//! | [`registry`] | all providers by kind and name, and open devices |
//! | [`pair`] | two-rank groups, formed at run time between any two processes |
//! | [`clock`] | the host's monotonic clock |

pub mod clock;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
pub mod link;
pub mod pair;
pub mod providers;
pub mod registry;
#[doc(hidden)]
pub mod testing;

// Groups.
mod communicator;
mod default_nics;
mod group_control;
mod poison;
pub use communicator::{Communicator, CommunicatorConfig, Progress};
pub use default_nics::{DefaultNics, GpuNics, NicReport, ProviderNics};
pub use group_control::GroupControl;
pub use poison::PoisonFlag;

// Engines: regions, counters, requests.
mod descriptor;
mod engine;
mod request;
mod statistics;
mod trace;
pub use descriptor::{CounterGrant, EngineAddress, Grant, RegionGrant};
pub use engine::{
    CounterConfig, Engine, EngineConfig, MemberWrite, PeerGroup, PeerWrite, RaisedCounter, Region,
    RemoteRegion, Route, WatchCallback, WatchCondition, WatchId, WeakRegion,
};
pub use request::CompletionCallback;
pub use statistics::{EngineStatistics, PeerStatistics, TrafficTotals};
pub use trace::{ArrivalRecord, PhaseRecord, Trace, WriteRecord};

// Drivers, waits, and engines that threads share.
mod driver;
mod inbox;
mod progress_demand;
mod shared_driver;
mod shared_engine;
mod submission_queue;
mod submitter;
mod wait;
mod waiters;
pub use driver::{Driver, Event, PageList, Requests, ScatterList, ScatterWrite};
pub use inbox::{OutcomeCallback, StridedPages, SubmissionDescriptor, SubmissionOperation};
pub use progress_demand::ProgressDemand;
pub use shared_driver::SharedDriver;
pub use shared_engine::{EngineGuard, SharedEngineAccess};
pub use submission_queue::{QueueReceiver, QueueSender, submission_queue};
pub use submitter::Submitter;
pub use wait::{EngineAccess, WaitOptions};

// Memory and registration with NICs.
mod memory;
mod registration;
pub use memory::{
    DmaBuf, Memory, MemoryId, MemoryKind, MemoryWatcher, Placement, Reader, copy_bytes,
};
pub use registration::{
    IdleLimits, Registration, RegistrationCache, RegistrationStatistics, UserBufferCache,
};

// Below the links: lanes, parts, connections within a host, network models.
mod atomics;
mod cores;
mod cpu_quota;
mod device;
mod lane_table;
mod lanes;
mod local;
mod mailbox;
mod network_model;
mod parts;
mod peer_memory;
mod processors;
mod timer;
mod unconsumed;
mod unproven;
pub use cores::CoreSet;
pub use cpu_quota::CpuQuota;
pub use device::Device;
pub use lane_table::LaneTable;
pub use link::{Link, MappedPeer, RouteRule};
pub use local::{DescriptorExchange, WaitLimit};
pub use mailbox::{MailboxWait, MailboxWaits, Mailboxes};
pub use network_model::{FlowId, LatencyBandwidth, NetworkModel};
pub use parts::PartRule;
pub use peer_memory::{MemoryReadError, MemoryReader, ProbeWord};
pub use processors::{ProcessorShare, Processors};

// Identities, units, errors.
mod error;
mod id_map;
mod types;
pub use error::{Error, MissingPeer, Result, missing_text};
pub use types::{
    CounterId, Generation, Lane, LaneId, Page, ProviderKind, RegionKey, RequestId, Time,
    TrafficClass,
};
pub use weft_control::{Cause, Poison, Rank, Rounded, bytes, random};
