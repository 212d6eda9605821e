//! Executor: runs schedules over the fabric.
//!
//! [`Collectives`] starts calls and waits for them. A call is divided into chunks that fit a channel's staging memory;
//! a plan is one rank's schedule for one chunk, with all positions and counts resolved, and is kept for later calls
//! with the same shape. A polled driver executes plans on several channels at a time.
//!
//! - `config.rs`, `call.rs`: configuration; call arguments
//! - `layout.rs`, `step.rs`, `plan.rs`: block positions; a rank's steps, and how they are made
//! - `read_plan.rs`, `reads.rs`: plans that read peer memory in place; their folds
//! - `direct_results.rs`: steps that write results to the caller's memory
//! - `planner.rs`, `selection.rs`: a call's chunks and plans; algorithm selection
//! - `channel.rs`, `driver.rs`: chunk execution; all channels and calls (`driver/connection.rs`: memory and counters;
//!   `driver/call_queue.rs`: calls in flight)
//! - `agreement.rs`, `collectives.rs`: agreement among all ranks; connection and calls
//! - `reducer.rs`, `team.rs`: a rank's reductions and copies; threads that share the long ones
//! - `short.rs`: short calls, by messages in mailboxes
//! - `timer.rs`: call times, for `weft tune`

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
