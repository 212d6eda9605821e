//! Device: this host's RDMA NICs.

use super::super::gpu_memory::{CudaGpus, Gpus};
use super::super::twin_gpus::TwinGpus;
use super::config::{VerbsChoice, VerbsConfig};
use super::library::Library;
use super::link::VerbsLink;
use super::nic::Nic;
use super::objects::provider_error;
use super::twin::TwinNic;
use super::{nic, twin};
use crate::device::Device;
use crate::error::Result;
use crate::link::{Link, Membership};
use crate::types::ProviderKind;
use std::sync::Arc;

/// This host's RDMA NICs. See the module documentation.
pub struct VerbsDevice {
    pub(super) library: &'static Library,
    pub(super) config: Arc<VerbsConfig>,
    pub(super) nics: Vec<Nic>,
    pub(super) gpus: Arc<dyn Gpus>,
    /// NICs in this process in place of the host's.
    _twins: Vec<Arc<TwinNic>>,
}

impl VerbsDevice {
    /// Finds the configured NICs.
    ///
    /// # Errors
    /// [`crate::Error::Provider`] if a value is out of range, there is no libibverbs, or a NIC is missing
    /// or not active. There is no fallback to another provider.
    pub fn new(config: VerbsConfig) -> Result<VerbsDevice> {
        config.check()?;
        let library = Library::get().map_err(provider_error)?;
        VerbsDevice::with(library, config, Arc::new(CudaGpus), Vec::new())
    }

    /// Device over simulated NICs, in place of [`VerbsConfig::devices`].
    ///
    /// # Errors
    /// Same as [`VerbsDevice::new`].
    #[doc(hidden)]
    pub fn over(config: VerbsConfig, twins: &[Arc<TwinNic>]) -> Result<VerbsDevice> {
        let gpus = TwinGpus::new(&Arc::default());
        VerbsDevice::over_with_gpus(config, twins, Arc::new(gpus))
    }

    /// [`VerbsDevice::over`], with simulated GPUs or a wrapper around them.
    ///
    /// # Errors
    /// Same as [`VerbsDevice::new`].
    #[doc(hidden)]
    pub fn over_with_gpus(
        config: VerbsConfig,
        twins: &[Arc<TwinNic>],
        gpus: Arc<dyn Gpus>,
    ) -> Result<VerbsDevice> {
        config.check()?;
        let ports = |twin: &Arc<TwinNic>| {
            let name = twin.name();
            (1..=twin.ports()).map(move |port| format!("{name}:{port}")).collect::<Vec<_>>()
        };
        let devices = twins.iter().flat_map(ports).collect();
        let config = VerbsConfig { devices, ..config };
        VerbsDevice::with(twin::library(), config, gpus, twins.to_vec())
    }

    fn with(
        library: &'static Library,
        config: VerbsConfig,
        gpus: Arc<dyn Gpus>,
        twins: Vec<Arc<TwinNic>>,
    ) -> Result<VerbsDevice> {
        let nics = nic::select(library, &config).map_err(provider_error)?;
        Ok(VerbsDevice { library, config: Arc::new(config), nics, gpus, _twins: twins })
    }

    /// Names of the NICs in use, with ports.
    pub fn nics(&self) -> impl Iterator<Item = String> {
        self.nics.iter().map(Nic::name)
    }
}

impl VerbsChoice {
    /// Checks that library and NICs exist, without opening a device.
    ///
    /// # Errors
    /// [`crate::Error::Provider`] if one is missing.
    pub fn check(&self) -> Result<()> {
        let library = Library::get().map_err(provider_error)?;
        nic::select(library, &self.resolve()).map(drop).map_err(provider_error)
    }
}

impl Device for VerbsDevice {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Verbs
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        let VerbsDevice { library, config, nics, gpus, .. } = self;
        Ok(Box::new(VerbsLink::open(library, config, nics, gpus, group)?))
    }

    fn details(&self) -> Vec<(&'static str, String)> {
        vec![
            ("library", self.library.path.to_string_lossy().into_owned()),
            ("nics", self.nics().collect::<Vec<_>>().join(",")),
        ]
    }
}
