//! Device: this host's NICs over libfabric.

use super::super::gpu_memory::{CudaGpus, Gpus};
use super::config::{
    OfiConfig, device_capability, provider_error, refuse_cache, select_offers, variable,
};
use super::link::OfiLink;
use super::objects::Domain;
use super::region::SourceCache;
use super::{info, library, sys};
use crate::device::Device;
use crate::error::Result;
use crate::link::{Link, Membership};
use crate::registration::IdleLimits;
use crate::types::ProviderKind;
use std::ffi::CString;
use std::sync::Arc;

/// This host's NICs over libfabric. See the module documentation.
#[derive(Clone)]
pub struct OfiDevice {
    config: OfiConfig,
    domains: Vec<Arc<Domain>>,
    gpus: Arc<dyn Gpus>,
    /// Shared by the groups; each registration keeps the domain of a NIC.
    sources: SourceCache,
}

impl OfiDevice {
    /// Opens the configured NICs.
    ///
    /// # Errors
    /// [`crate::Error::Provider`] if a value is out of range, there is no libfabric, or it does not offer
    /// the provider. There is no fallback to another provider.
    pub fn new(config: OfiConfig) -> Result<OfiDevice> {
        OfiDevice::with_gpus(config, Arc::new(CudaGpus))
    }

    /// [`OfiDevice::new`], with simulated GPUs or a wrapper around them.
    ///
    /// # Errors
    /// Same as [`OfiDevice::new`].
    #[doc(hidden)]
    pub fn with_gpus(config: OfiConfig, gpus: Arc<dyn Gpus>) -> Result<OfiDevice> {
        let limits = [
            ("max_part_bytes", config.max_part_bytes, 1, u64::MAX),
            ("queue_parts", config.queue_parts.into(), 1, 1 << 20),
            ("max_unconsumed", config.max_unconsumed.into(), 4, 1 << 20),
        ];
        for (name, value, least, most) in limits {
            if !(least..=most).contains(&value) {
                return Err(provider_error(format!("{name} {value}: expected {least} to {most}")));
            }
        }
        refuse_cache(&config.provider, variable)?;
        let wanted = device_capability() | if config.checks_senders { sys::FI_SOURCE } else { 0 };
        let offers = info::offers(&config.provider, config.bind, wanted).map_err(provider_error)?;
        let chosen = select_offers(&config, offers)?;
        let name = config.provider.is_single_host().then(shm_endpoint_name).transpose()?;
        let domains = chosen.into_iter().map(|mut info| {
            name.iter().for_each(|name| info.name_endpoints(name));
            Domain::open(info).map(Arc::new)
        });
        let domains = domains.collect::<Result<Vec<_>, String>>().map_err(provider_error)?;
        let sources = SourceCache::new(IdleLimits::NONE);
        Ok(OfiDevice { config, domains, gpus, sources })
    }

    /// Names of the NICs in use.
    pub fn domains(&self) -> impl Iterator<Item = String> {
        self.domains.iter().map(|domain| domain.info().domain_name())
    }
}

impl Device for OfiDevice {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Ofi
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        Ok(Box::new(OfiLink::open(
            &self.config,
            &self.domains,
            (&self.gpus, &self.sources),
            group,
        )?))
    }

    fn details(&self) -> Vec<(&'static str, String)> {
        let mut details = vec![("provider", self.config.provider.name().to_owned())];
        if let Ok((path, (major, minor))) = library() {
            details.push(("libfabric", format!("{major}.{minor}")));
            details.push(("library", path.to_string_lossy().into_owned()));
        }
        details.push(("domains", self.domains().collect::<Vec<_>>().join(",")));
        details
    }

    /// Providers that emulate remote writes progress only inside calls.
    fn demands_thread(&self) -> bool {
        !self.domains.iter().all(|domain| domain.info().progresses_by_itself())
    }
}

/// Unique endpoint name. By default libfabric takes the process number: a killed process leaves a file
/// behind, which blocks a later process with the same number.
fn shm_endpoint_name() -> Result<CString> {
    let mut random = [0; 8];
    getrandom::fill(&mut random)
        .map_err(|e| provider_error(format!("no random bytes from the system: {e}")))?;
    let (process, random) = (std::process::id(), u64::from_le_bytes(random));
    let name = CString::new(format!("fi_shm://weft-{process}-{random:016x}"));
    name.map_err(|_| provider_error("endpoint name with a zero byte"))
}
