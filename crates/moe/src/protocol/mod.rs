//! Protocol over a fabric: the polled driver for all channels, and the calls that run it.
//!
//! - `peer.rs`: a peer's state in one channel
//! - `channel_memory.rs`: channel memory, by area
//! - `channel`: a channel and the state machine for its round
//! - `driver.rs`: all channels as one polled driver
//! - `round.rs`: round calls on the driver
//! - `all_to_all.rs`: blocking calls
//! - `connect.rs`: construction on all ranks, and the end
//! - `outcome.rs`: exchange of each rank's outcome

pub(crate) mod all_to_all;
pub(crate) mod channel;
mod channel_memory;
mod connect;
pub(crate) mod driver;
pub(crate) mod outcome;
mod peer;
pub(crate) mod round;
