//! Configuration for a communicator and the devices it opens.

use crate::engine::EngineConfig;
use crate::error::Result;
use crate::providers::copy::CopyBackend;
use crate::providers::{OfiChoice, Staging, VerbsChoice};
use crate::registration::IdleLimits;
use crate::registry;
use crate::registry::DeviceConfig;
use crate::types::ProviderKind;
use std::time::Duration;
use weft_control::Control;

/// Progress source for links that need one. Stores to peers on the same host need none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Progress {
    /// Threads that submit or wait.
    #[default]
    Caller,
    /// A progress thread that the communicator starts, in addition.
    Thread,
    /// The program's event loop: see [`crate::Engine::descriptor`].
    Epoll,
}

/// Communicator configuration. For example, `providers: vec![ProviderKind::Tcp]` keeps all traffic on
/// sockets.
#[derive(Clone)]
pub struct CommunicatorConfig {
    /// Control plane configuration.
    pub control: weft_control::Config,
    /// Providers. A route takes the first one, in [`ProviderKind`] order, that both ends have and that
    /// reaches the peer.
    pub providers: Vec<ProviderKind>,
    /// Memory and copy engines for the copy provider, if it is among the providers.
    pub devices: CopyBackend,
    /// Providers that carry GPU memory through slots in host memory: see [`crate::providers::StagedDevice`].
    pub staged: Staging,
    /// Seed for a [`crate::providers::HostileDevice`] wrapper around every device, for tests.
    pub hostile: Option<u64>,
    /// Libfabric provider and NICs, if the ofi provider is among the providers; `None`:
    /// [`OfiChoice::from_env`].
    pub ofi: Option<OfiChoice>,
    /// NICs for the verbs provider, if it is among the providers; `None`: [`VerbsChoice::from_env`].
    pub verbs: Option<VerbsChoice>,
    /// Engine limits and timeouts.
    pub engine: EngineConfig,
    /// Progress source.
    pub progress: Progress,
    /// Spin deadline for waits. `None`: 50 us if the host has a core for each local rank, otherwise 200
    /// us, in which a wait yields the core between two polls.
    pub spin: Option<Duration>,
    /// User buffers that stay registered after the last region on them is released. None by default.
    pub kept_user_buffers: IdleLimits,
}

impl CommunicatorConfig {
    /// The default: shm within a host, tcp between hosts.
    pub fn new(control: weft_control::Config) -> CommunicatorConfig {
        CommunicatorConfig {
            control,
            providers: registry::defaults(),
            devices: CopyBackend::default(),
            staged: Staging::default(),
            hostile: None,
            ofi: None,
            verbs: None,
            engine: EngineConfig::default(),
            progress: Progress::default(),
            spin: None,
            kept_user_buffers: IdleLimits::NONE,
        }
    }
}

/// Sockets listen on the control plane's address.
pub(super) fn device_config(control: &Control, config: &CommunicatorConfig) -> DeviceConfig {
    let reached = control.members()[control.rank().index()].address;
    DeviceConfig {
        host_id: config.control.host_id.clone(),
        bind: config.control.bind.unwrap_or(reached),
        advertise: config.control.advertise,
        devices: config.devices,
        staged: config.staged,
        hostile: config.hostile,
        ofi: config.ofi.clone(),
        verbs: config.verbs.clone(),
    }
}

/// Checks that this machine can use the configured providers.
pub(super) fn check_providers(config: &CommunicatorConfig) -> Result<()> {
    let CommunicatorConfig { providers, ofi, verbs, .. } = config;
    registry::check_variables(ofi, verbs)?;
    providers.iter().try_for_each(|kind| registry::check(*kind, ofi, verbs))
}
