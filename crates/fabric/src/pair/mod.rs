//! Pairs: two-rank groups, formed at run time between any two processes.
//!
//! A process listens on one port for all pairs ([`Listener`]); another connects ([`connect`]). The
//! connection authenticates by the shared secret as a rendezvous does (`weft_control::pair`) and stays as
//! the pair's control connection. A pair is a [`Communicator`](crate::Communicator) with two ranks, the
//! listener 0 and the connector 1. A pair has no thread and no port: one thread in the process monitors
//! all pairs' control connections. A connection that ends without a departure, or is silent, poisons only
//! that pair.
//!
//! Formation takes one exchange after the dialler has authenticated:
//!
//! 1. The dialler's proof carries the dialler's addresses.
//! 2. The listener sends an offer: addresses, introductions and lanes.
//! 3. Over tcp, the dialler opens a second connection to the same port, and identifies the pair by token.
//! 4. The dialler replies with introductions and lanes; both connect.
//! 5. The listener confirms that it has formed the pair.
//!
//! - `config.rs`: [`PairConfig`]
//! - `listener.rs`: [`Listener`]; `pending_pair.rs`: one end during formation; `connect.rs`: [`connect`]

mod config;
mod connect;
mod listener;
mod pending_pair;

pub use connect::connect;
pub use listener::Listener;
#[cfg(any(test, feature = "fuzz"))]
pub use pending_pair::fuzz;

pub use config::PairConfig;
