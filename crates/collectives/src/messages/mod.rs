//! Tagged messages between two ranks: sends and receives over rings of slots.
//!
//! [`Messages`] is created by all ranks of a communicator. Messages from one rank with one tag are received in
//! the order of their sends; messages of different tags are matched independently. [`MessagesConfig`] has the
//! limits.
//!
//! **Ring.** Each rank owns a ring of slots for each peer. The rings of a rank are one region, of which a peer is
//! granted its own ring alone, and one counter with a window of as many rounds as a ring has slots: round `r`
//! is a write of one part into slot `r % slots`. A message occupies as many consecutive rounds as it needs; its
//! first slot begins with a [header](header::Header). The owner credits a slot once its bytes are copied out.
//!
//! **Sends.** A message of less than a ring is copied into a staging ring and written from there. A longer one is
//! registered and written from its own memory, but for its first slot. A send has ended when all of its bytes have
//! left this process; up to `slots * slot_bytes` bytes leave without a receive at the peer. A longer message
//! without a receive waits until the peer receives it, or buffers it.
//!
//! **Receives.** Bytes are copied from the ring to the memory of the receive as slots arrive. A message without a
//! receive stays in the ring. It is moved to a buffer if it blocks its ring, or if a receive of another tag
//! waits for messages behind it. Buffers of a rank hold up to `max_unexpected_bytes`; beyond that the ring
//! stays full and the sender waits. A sequence of sends that relies on more is a deadlock, which ends at the
//! deadlines of the waits.
//!
//! **Progress.** A wait for one message, in any thread of a rank, advances all messages of that rank. Without a
//! wait they advance when an operation starts.
//!
//! - `calls`: [`Messages`], calls on all messages of a communicator; `connect`: its construction and its end
//! - `config`: limits; `header`: first bytes of a message
//! - `driver`: polled state machine; `outgoing` and `incoming`: its state toward and from one peer
//! - `matching`: receives without a message, and messages without a receive
//! - `operations`: table of operations; `memory`: rings, and memory of operations

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
