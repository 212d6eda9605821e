//! Pairs: groups of two, formed at run time between any two processes.
//!
//! A process listens on one port for all its pairs ([`Listener`]); another connects ([`connect`]). The
//! connection authenticates by the shared secret as a rendezvous does (`weft_control::pair`) and stays as
//! the pair's control connection. A pair is a [`Communicator`](crate::Communicator) of two ranks, the
//! listener 0 and the connector 1. It has no thread and no port of its own: one thread of the process
//! monitors the control connections of all pairs. A connection that ends without a departure, or is
//! silent, poisons its pair only.
//!
//! Formation takes one exchange after the authentication of the dialler:
//!
//! 1. The dialler's proof carries its addresses.
//! 2. The listener sends its offer: addresses, introductions and lanes.
//! 3. Over tcp, the dialler opens a second connection to the same port, and identifies the pair by its
//!    token.
//! 4. The dialler replies with its introductions and lanes; both connect.
//! 5. The listener confirms that it has formed the pair.
//!
//! - `listener.rs`: [`Listener`]; `pending_pair.rs`: one end during formation; `connect.rs`: [`connect`]

mod connect;
mod listener;
mod pending_pair;

pub use connect::connect;
pub use listener::Listener;
#[cfg(any(test, feature = "fuzz"))]
pub use pending_pair::fuzz;

use crate::communicator::Progress;
use crate::engine::EngineConfig;
use crate::providers::OfiChoice;
use crate::registry;
use crate::types::ProviderKind;
use std::time::Duration;
use weft_control::pair::PairSettings;

/// Configuration of one end of a pair.
#[derive(Clone)]
pub struct PairConfig {
    /// Address, secret and host.
    pub settings: PairSettings,
    /// Providers, of shm, verbs, ofi and tcp.
    pub providers: Vec<ProviderKind>,
    /// Provider and NICs of libfabric, if ofi is among the providers.
    pub ofi: OfiChoice,
    /// Limits of each pair's engine.
    pub engine: EngineConfig,
    /// Source of progress. [`Progress::Thread`] starts a thread for each pair, and so does ofi over a provider of
    /// libfabric that progresses inside of calls only.
    pub progress: Progress,
    /// Spin deadline of waits; `None`: as [`crate::CommunicatorConfig::spin`].
    pub spin: Option<Duration>,
}

impl PairConfig {
    /// The default: shm within a host, tcp between hosts.
    pub fn new(settings: PairSettings) -> PairConfig {
        PairConfig {
            settings,
            providers: registry::pair_defaults(),
            ofi: OfiChoice::from_env(),
            engine: EngineConfig::for_pair(),
            progress: Progress::default(),
            spin: None,
        }
    }
}
