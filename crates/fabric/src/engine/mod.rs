//! Engine: one rank's state in one group generation.
//!
//! An engine lives as long as the group: connections, lane table and memory are made together, poisoned
//! together and never reused (decision record 0001). It has no thread and no clock: a poll takes the time
//! as an argument. (Only the trace reads the host's clock.) [`crate::wait`] has the blocking calls, and
//! with them the clock.
//!
//! - `state.rs`, `config.rs`: engine state and construction; limits and timeouts
//! - `connect.rs`, `route.rs`: introductions, connections and routes
//! - `counters.rs`, `counters/followers.rs`: counters, rounds, credits; credits shared by several counters
//! - `regions.rs`, `region.rs`: registrations, grants and imports; the regions themselves
//! - `submit.rs`, `target.rs`: writes and validation
//! - `peer_group.rs`, `scatter.rs`: scatters over peers resolved once; drivers' scatters
//! - `post.rs`, `queue.rs`, `complete.rs`: parts posted to a link, queued parts, completions
//! - `peer_queue.rs`: writes to one peer that wait for room in the link
//! - `handover.rs`: requests whose copied bytes have not left the link
//! - `progress.rs`: polls, arrivals, losses
//! - `watches.rs`, `watch_list.rs`: callbacks for counters, credits and requests; conditions
//! - `sleep.rs`, `wake_sources.rs`: deadlines and event loops; descriptors and the sleep on them
//! - `barrier_state.rs`: barrier progress
//! - `unique_id.rs`: process-wide unique numbers

mod barrier_state;
mod complete;
mod config;
mod connect;
mod counters;
mod handover;
mod peer_group;
mod peer_queue;
mod post;
mod progress;
mod queue;
mod region;
mod regions;
mod route;
mod scatter;
mod sleep;
mod state;
mod submit;
mod target;
mod unique_id;
mod wake_sources;
mod watch_list;
mod watches;

pub use config::EngineConfig;
pub use counters::CounterConfig;
pub use peer_group::{MemberWrite, PeerGroup};
pub use progress::RaisedCounter;
pub use region::{Region, RemoteRegion, WeakRegion};
pub use route::Route;
pub use state::Engine;
pub use submit::PeerWrite;
pub(crate) use wake_sources::{AnnouncedSleep, MAX_PARK};
pub use watch_list::{WatchCallback, WatchCondition, WatchId};
