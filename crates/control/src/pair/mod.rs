//! Pair group control connection, which two processes form at run time.
//!
//! The dialer authenticates with the control plane handshake under a separate magic, so group
//! ports and pair ports reject each other's dialers. The connection then carries exchanges, poison and
//! leave in control plane messages (`docs/wire-format-control.md`). One thread in the process
//! serves all pairs.
//!
//! - `settings.rs`, `dialer.rs`: settings for an end; the end that connects
//! - `incoming.rs`: accepted connection before the handshake has ended
//! - `control.rs`: [`PairControl`], the handle; `state.rs`: the socket and clocks
//! - `protocol.rs`: message effects on a pair, without sockets
//! - `heartbeat.rs`: the thread for all pairs in a process: heartbeats and silence detection
//! - `stream_token.rs`: token for a further connection
//! - `socket.rs`: frames over a non-blocking socket

mod control;
mod dialer;
mod heartbeat;
mod incoming;
pub(crate) mod protocol;
mod settings;
mod socket;
mod state;
pub(super) mod stream_token;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tls_tests;

pub use crate::tls::MaybeTlsStream;
pub use control::PairControl;
pub use dialer::{dial, dial_stream};
pub use incoming::{IncomingConnection, IncomingStep};
pub use settings::{CONNECTOR, LISTENER, PAIR_VERSIONS, PairSettings};
pub use socket::{descriptor_error, nonblocking_listener};
pub use stream_token::StreamToken;

/// Longest details for an end, in bytes.
pub const MAX_DETAILS: usize = 3 << 10;
