//! Configuration for one end of a pair.

use crate::communicator::Progress;
use crate::engine::EngineConfig;
use crate::providers::{CopyBackend, OfiChoice, Staging, VerbsChoice};
use crate::registry;
use crate::types::ProviderKind;
use std::time::Duration;
use weft_control::pair::PairSettings;

/// Configuration for one end of a pair.
#[derive(Clone)]
pub struct PairConfig {
    /// Address, secret and host.
    pub settings: PairSettings,
    /// Providers, among copy, shm, verbs, ofi and tcp.
    pub providers: Vec<ProviderKind>,
    /// Memory and copy engines, if copy is among the providers.
    pub devices: CopyBackend,
    /// Libfabric provider and NICs, if ofi is among the providers; `None`: [`OfiChoice::from_env`].
    pub ofi: Option<OfiChoice>,
    /// NICs, if verbs is among the providers; `None`: [`VerbsChoice::from_env`]. A pair with a source, or a listener
    /// whose peer has one, also uses NICs that this leaves out.
    pub verbs: Option<VerbsChoice>,
    /// Providers that carry GPU memory through slots, among shm and tcp.
    pub staged: Staging,
    /// Limits for each pair's engine.
    pub engine: EngineConfig,
    /// Progress source. [`Progress::Thread`] starts a thread for each pair, and so does ofi over a
    /// libfabric provider that progresses only inside calls.
    pub progress: Progress,
    /// Spin deadline for waits; `None`: same as [`crate::CommunicatorConfig::spin`].
    pub spin: Option<Duration>,
}

impl PairConfig {
    /// The default: shm within a host, tcp between hosts.
    pub fn new(settings: PairSettings) -> PairConfig {
        PairConfig {
            settings,
            providers: registry::pair_defaults(),
            devices: CopyBackend::default(),
            ofi: None,
            verbs: None,
            staged: Staging::default(),
            engine: EngineConfig::for_pair(),
            progress: Progress::default(),
            spin: None,
        }
    }
}
