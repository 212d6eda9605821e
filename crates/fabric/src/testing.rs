//! Internals for this crate's own tests, such as loom models. Not part of the interface.

pub use crate::atomics::{CacheLine, Word32, Word64, orders};
pub use crate::inbox::Ring;
pub use crate::lanes::{Lanes, SleepMode, Wake};
pub use crate::mailbox::{MailboxArea, MailboxEnd, SLOTS};
pub use crate::submission_queue::Bell;
pub use crate::waiters::{LeaderSleep, Waiters};
