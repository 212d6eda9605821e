//! Pair groups: groups of two, made between any two processes at run time.
//!
//! A process listens on one port for all its pairs ([`Listener`]); another connects ([`connect`]). The
//! connection proves the shared secret as bootstrap does (`weft_control::pair`) and stays as the pair's
//! control connection. A pair is a [`Communicator`] of two ranks, the listener 0 and the connector 1. It
//! has no thread and no port of its own: one thread of the process watches the control connections of all
//! pairs. The end of one without a goodbye, or silence on it, poisons its pair alone.
//!
//! Forming takes one exchange once the dialler has proved itself:
//!
//! 1. The dialler's proof carries its addresses.
//! 2. The listener answers with its addresses, introductions and lanes.
//! 3. Over tcp, the dialler opens a second connection to the same port, and names the pair by its token.
//! 4. The dialler answers with its introductions and lanes; both connect.
//! 5. The listener confirms that it has formed the pair.
//!
//! - `listener.rs`: [`Listener`]; `forming.rs`: an end that is being formed; `connect.rs`: [`connect`]

mod connect;
mod forming;
mod listener;

pub use connect::connect;
#[cfg(any(test, feature = "fuzz"))]
pub use forming::fuzz;
pub use listener::Listener;

use crate::communicator::Progress;
use crate::engine::EngineConfig;
use crate::types::ProviderKind;
use std::time::Duration;
use weft_control::pair::Settings;

/// How a pair is made. Both ends have one.
#[derive(Clone)]
pub struct PairConfig {
    /// The address, the secret, the host.
    pub settings: Settings,
    /// The providers to use: shm, tcp or both.
    pub providers: Vec<ProviderKind>,
    /// Limits of each pair's engine.
    pub engine: EngineConfig,
    /// Who makes progress. [`Progress::Thread`] starts a thread for each pair.
    pub progress: Progress,
    /// How long a wait spins before it parks; `None`: as [`crate::communicator::CommunicatorConfig::spin`].
    pub spin: Option<Duration>,
}

impl PairConfig {
    /// The default: shm within a host, tcp between hosts.
    pub fn new(settings: Settings) -> PairConfig {
        PairConfig {
            settings,
            providers: vec![ProviderKind::Shm, ProviderKind::Tcp],
            engine: EngineConfig::for_pair(),
            progress: Progress::default(),
            spin: None,
        }
    }
}
