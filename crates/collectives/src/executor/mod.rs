//! Executor: runs schedules over the fabric.
//!
//! [`Collectives`] starts calls and waits for them. A call is divided into chunks that fit the staging memory of
//! a channel; a plan is the schedule of one rank for one chunk, with all positions and counts resolved, and is
//! kept for later calls of the same shape. A polled driver executes the plans of several channels at a time.
//!
//! - `config.rs`, `call.rs`: configuration; arguments of a call
//! - `layout.rs`, `step.rs`, `plan.rs`: positions of blocks; steps of a rank, and how they are made
//! - `read_plan.rs`, `reads.rs`: plans that read peers' memory in place; their folds
//! - `direct_results.rs`: steps that write results to the caller's memory
//! - `planner.rs`, `selection.rs`: chunks of a call and their plans; choice of an algorithm
//! - `channel.rs`, `driver.rs`: execution of a chunk; all channels and calls (`driver/connection.rs`: memory and
//!   counters; `driver/call_queue.rs`: calls in flight)
//! - `agreement.rs`, `collectives.rs`: agreement of all ranks; connection and calls
//! - `reducer.rs`, `team.rs`: reductions and copies of a rank; threads that share the long ones
//! - `short.rs`: short calls, by messages in mailboxes
//! - `timer.rs`: times of calls, for `weft tune`

mod agreement;
mod call;
mod channel;
mod collectives;
mod config;
mod direct_results;
mod driver;
mod layout;
mod plan;
mod planner;
mod read_plan;
mod reads;
mod reducer;
mod selection;
mod short;
mod step;
mod team;
mod timer;

pub use agreement::SelectionSources;
pub use call::{Call, CallId, Scale};
pub use collectives::Collectives;
pub use config::{CollectivesConfig, GroupRoutes};
pub use driver::Executor;
pub use timer::{CallTimer, Timed, memory_rates};
