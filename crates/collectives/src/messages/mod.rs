//! Tagged messages between two ranks: sends and receives over slot rings.
//!
//! All ranks in a communicator create [`Messages`]. Messages from one rank with one tag are received in send order;
//! messages with different tags are matched independently. [`MessagesConfig`] has the limits.
//!
//! **Ring.** Each rank owns a slot ring for each peer. A rank's rings are one region, in which a peer is granted only
//! one ring, and one counter with a window that has as many rounds as a ring has slots: round `r` writes one part into
//! slot `r % slots`. A message occupies as many consecutive rounds as it needs; its first slot begins with a
//! [header](header::Header). The owner credits a slot once the bytes are copied out.
//!
//! **Sends.** A message shorter than a ring is copied into a staging ring and written from there. A longer one is
//! registered and written from user memory, except for the first slot. A send has ended when all bytes have left this
//! process; up to `slots * slot_bytes` bytes leave without a receive at the peer. A longer message without a receive
//! waits until the peer receives it, or buffers it.
//!
//! **Receives.** Bytes are copied from the ring to the receive memory as slots arrive. A message without a receive
//! stays in the ring. It is moved to a buffer if it blocks the ring, or if a receive with another tag waits for
//! messages behind it. A rank's buffers hold up to `max_unexpected_bytes`; beyond that the ring stays full and the
//! sender waits. A send sequence that relies on more is a deadlock, which ends at the wait deadlines.
//!
//! **Progress.** A wait for one message, in any thread on a rank, advances all messages on that rank. Without a wait
//! they advance when an operation starts.
//!
//! - `calls`: [`Messages`], calls on all messages in a communicator; `connect`: construction and close
//! - `config`: limits; `header`: first message bytes
//! - `driver`: polled state machine; `outgoing` and `incoming`: state toward and from one peer
//! - `matching`: receives without a message, and messages without a receive
//! - `operations`: operation table; `memory`: rings, and operation memory

mod calls;
mod config;
mod connect;
mod driver;
pub mod header;
mod incoming;
mod matching;
mod memory;
mod operations;
mod outgoing;

pub use calls::Messages;
pub use config::MessagesConfig;
pub use driver::Driver;
pub use operations::{Completed, OperationId};
