//! Networks over libfabric: EFA, and its other providers of reliable datagrams.
//!
//! A part is one RDMA write with the lane as its remote CQ data (`fi_writemsg`). The provider assumes no
//! order, and no sender of an arrival: the lane table holds the peer of each lane. The library is loaded at
//! run time. Demands of a libfabric provider on its caller, memory registration modes above all, are read
//! from its offer ([`info`]).
//!
//! Trust: the key of a region is the right to write to it. An endpoint for reliable datagrams can neither
//! disconnect one peer nor check a grant per peer. Therefore keys are random, the key of a released region
//! is void, and the fence of a lost group closes its endpoints.
//!
//! - `library.rs`, `sys.rs`, `objects.rs`: libfabric, its C layouts, its objects with owners
//! - `signals.rs`: the program's signal actions, restored after libfabric loads
//! - `info.rs`: offers of libfabric
//! - `rail.rs`: one NIC of one group: endpoint, completion queue, writes in flight
//! - `slots.rs`: scratch memory and use of each operation in flight
//! - `link/`, `peer.rs`, `region.rs`: one group's use of the device
//! - `wire.rs`: addresses, introductions, grants as bytes

mod info;
mod library;
mod link;
mod objects;
mod peer;
mod rail;
mod region;
mod signals;
mod slots;
mod sys;
mod wire;

pub use info::OfiProvider;
pub use library::PATH as LIBRARY_PATH;
#[doc(hidden)]
pub use sys::layout;

use crate::bytes::put_block;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::link::{Link, Membership};
use crate::types::ProviderKind;
use info::Info;
use library::Library;
use link::OfiLink;
use objects::Domain;
use std::ffi::CString;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use weft_control::HostIdentity;

/// Configuration of an [`OfiDevice`]. A pair of ranks uses the smaller of their `max_part_bytes` and
/// `max_unconsumed`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfiConfig {
    /// Provider of libfabric: `efa`, `efa-direct`, `tcp;ofi_rxm`, `tcp`, `shm`, `verbs;ofi_rxm`.
    pub provider: OfiProvider,
    /// Name of this host, for providers that reach only ranks of their own host.
    pub host_id: String,
    /// Address that endpoints listen on, for providers of the Internet protocol.
    pub bind: IpAddr,
    /// Domains (NICs) to use, by libfabric's names; names may repeat. Empty: all NICs of `efa`, and the
    /// first offer of other providers.
    pub domains: Vec<String>,
    /// Longest part of a write.
    pub max_part_bytes: u64,
    /// Shortest write, in bytes, that is striped over several NICs.
    pub stripe_from: u64,
    /// Parts in flight on each NIC, at least 1.
    pub queue_parts: u32,
    /// Unconsumed arrivals from each peer, at least 4. Fewer if a completion queue could overflow with this
    /// many peers.
    pub max_unconsumed: u32,
    /// Drops and counts an arrival whose lane is granted to another peer than its sender, where the
    /// provider names senders (`FI_SOURCE`). Otherwise an arrival is that of its lane's holder.
    pub checks_senders: bool,
}

impl Default for OfiConfig {
    fn default() -> Self {
        OfiConfig {
            provider: OfiProvider::new("tcp;ofi_rxm"),
            host_id: HostIdentity::here().host_id(),
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            domains: Vec::new(),
            max_part_bytes: 1 << 30,
            stripe_from: 128 << 10,
            queue_parts: 1024,
            max_unconsumed: 1024,
            checks_senders: false,
        }
    }
}

/// Environment variable: [`OfiConfig::provider`].
pub const PROVIDER: &str = "WEFT_OFI_PROVIDER";
/// Environment variable: [`OfiConfig::domains`].
pub const DOMAINS: &str = "WEFT_OFI_DOMAINS";

/// Environment variable: 1 sets [`OfiConfig::checks_senders`].
pub const CHECK_SENDERS: &str = "WEFT_OFI_CHECK_SENDERS";

/// Explicit choice of provider and NICs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfiChoice {
    /// [`OfiConfig::provider`]. `None`: `efa` where libfabric offers it, else `tcp;ofi_rxm`. A device with
    /// an explicit provider uses it or fails to open.
    pub provider: Option<String>,
    /// [`OfiConfig::domains`].
    pub domains: Vec<String>,
    /// [`OfiConfig::checks_senders`].
    pub checks_senders: bool,
}

impl OfiChoice {
    /// Choice by `WEFT_OFI_PROVIDER`, `WEFT_OFI_DOMAINS` (names with commas) and `WEFT_OFI_CHECK_SENDERS`
    /// (1 or unset).
    pub fn from_env() -> OfiChoice {
        let split = |names: String| names.split(',').map(|name| name.trim().to_owned()).collect();
        let domains = variable(DOMAINS).map_or_else(Vec::new, split);
        OfiChoice {
            provider: variable(PROVIDER).map(|name| name.trim().to_owned()),
            domains,
            checks_senders: variable(CHECK_SENDERS).is_some_and(|value| value.trim() == "1"),
        }
    }

    /// Configuration with this choice.
    pub fn resolve(&self, bind: IpAddr) -> OfiConfig {
        let provider = match &self.provider {
            Some(name) => OfiProvider::new(name),
            None => {
                let efa = OfiProvider::new("efa");
                let has_efa = info::offers(&efa, bind, 0).is_ok();
                if has_efa { efa } else { OfiConfig::default().provider }
            }
        };
        let OfiChoice { domains, checks_senders, .. } = self.clone();
        OfiConfig { provider, domains, checks_senders, ..OfiConfig::default() }
    }

    /// Checks that library, provider and NICs exist, without opening them.
    ///
    /// # Errors
    /// [`Error::Provider`] if one of them is missing.
    pub fn check(&self) -> Result<()> {
        let bind = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let config = OfiConfig { bind, ..self.resolve(bind) };
        refuse_cache(&config.provider, variable)?;
        let offers = info::offers(&config.provider, bind, 0).map_err(provider_error)?;
        select_offers(&config, offers).map(drop)
    }
}

/// NICs of this host over libfabric. See the module's page.
#[derive(Clone)]
pub struct OfiDevice {
    config: OfiConfig,
    domains: Vec<Arc<Domain>>,
}

impl OfiDevice {
    /// Opens the NICs of a configuration.
    ///
    /// # Errors
    /// [`Error::Provider`] if a value is out of range, there is no libfabric, or it does not offer the
    /// provider. No other provider takes its place.
    pub fn new(config: OfiConfig) -> Result<OfiDevice> {
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
        Ok(OfiDevice { config, domains })
    }

    /// Names of the NICs in use.
    pub fn domains(&self) -> impl Iterator<Item = String> {
        self.domains.iter().map(|domain| domain.info().domain_name())
    }
}

/// Value of an environment variable, unless it is empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

/// Refuses a provider over verbs whose registrations libfabric caches: peers could write to released regions.
fn refuse_cache(provider: &OfiProvider, variable: impl Fn(&str) -> Option<String>) -> Result<()> {
    let is = |name: &str, value| variable(name).is_some_and(|found| found.trim() == value);
    let has_cache = !is("FI_MR_CACHE_MAX_COUNT", "0") && !is("FI_MR_CACHE_MONITOR", "disabled");
    if provider.name().starts_with("verbs") && has_cache {
        return Err(provider_error(format!(
            "provider {}: libfabric caches registrations, so a released region stays writable; set \
             FI_MR_CACHE_MAX_COUNT=0 in the environment of all ranks",
            provider.name()
        )));
    }
    Ok(())
}

/// Capability for memory of CUDA devices, on a host with a driver for them.
fn device_capability() -> u64 {
    if weft_cuda::driver().is_ok() { sys::FI_HMEM } else { 0 }
}

/// Offers named by a configuration, or the provider's default.
fn select_offers(config: &OfiConfig, offers: Vec<Info>) -> Result<Vec<Info>> {
    if config.domains.is_empty() {
        let count = if config.provider.is_efa() { offers.len() } else { 1 };
        return Ok(offers.into_iter().take(count).collect());
    }
    let named = |name: &String| {
        let found = offers.iter().find(|offer| offer.domain_name() == *name);
        found.cloned().ok_or_else(|| {
            let names: Vec<String> = offers.iter().map(Info::domain_name).collect();
            let (provider, names) = (config.provider.name(), names.join(", "));
            let at = if config.provider.is_ip() && !config.bind.is_unspecified() {
                format!(" at {}", config.bind)
            } else {
                String::new()
            };
            provider_error(format!(
                "domain {name}: provider {provider} offers {names}{at}; name one of these in {DOMAINS}"
            ))
        })
    };
    config.domains.iter().map(named).collect()
}

fn provider_error(detail: impl Into<String>) -> Error {
    Error::Provider { provider: ProviderKind::Ofi, detail: detail.into() }
}

impl Device for OfiDevice {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Ofi
    }

    fn open(&self, group: Membership) -> Result<Box<dyn Link>> {
        Ok(Box::new(OfiLink::open(&self.config, &self.domains, group)?))
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

    /// Providers that emulate remote writes progress only inside of calls.
    fn demands_thread(&self) -> bool {
        !self.domains.iter().all(|domain| domain.info().progresses_by_itself())
    }
}

/// Unique endpoint name. libfabric's default is the process number: a killed process leaves its file
/// behind, which blocks a later process of the same number.
fn shm_endpoint_name() -> Result<CString> {
    let mut random = [0; 8];
    getrandom::fill(&mut random)
        .map_err(|e| provider_error(format!("no random bytes from the system: {e}")))?;
    let (process, random) = (std::process::id(), u64::from_le_bytes(random));
    let name = CString::new(format!("fi_shm://weft-{process}-{random:016x}"));
    name.map_err(|_| provider_error("endpoint name with a zero byte"))
}

/// Scope within which endpoints of a provider reach each other; empty without such a bound.
fn realm(config: &OfiConfig) -> Vec<u8> {
    let HostIdentity { boot, network, processes, user, .. } = HostIdentity::here();
    let mut realm = Vec::new();
    if config.provider.is_single_host() {
        put_block(&mut realm, config.host_id.as_bytes());
        put_block(&mut realm, processes.as_bytes());
        realm.extend(user.to_le_bytes());
    } else if config.provider.is_ip() && config.bind.is_loopback() {
        put_block(&mut realm, boot.as_bytes());
        put_block(&mut realm, network.as_bytes());
    }
    realm
}

/// Offer of a libfabric provider on this host, for `weft doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Domain: a NIC.
    pub domain: String,
    /// Fabric: a network.
    pub fabric: String,
    /// Maximum number of bytes of one part.
    pub max_part_bytes: u64,
    /// Maximum number of ranges of one part.
    pub max_ranges: u32,
    /// True if sources must be registered.
    pub registers_sources: bool,
    /// True if each arrival consumes a posted receive.
    pub consumes_receives: bool,
    /// True if writes progress without calls into the library.
    pub progresses_by_itself: bool,
    /// True if memory of CUDA devices can be registered.
    pub reaches_devices: bool,
}

/// Path and version (major, minor) of the libfabric of this process.
///
/// # Errors
/// Reason why it is missing.
pub fn library() -> Result<(std::path::PathBuf, (u32, u32)), String> {
    let library = Library::get()?;
    Ok((library.path().clone(), library.version()))
}

/// Names of the providers in the libfabric of this process, with or without NICs.
///
/// # Errors
/// Reason why the library is missing.
pub fn built_in() -> Result<Vec<String>, String> {
    info::built_in()
}

/// Offers of a provider on this host; `bind`: address that endpoints would listen on.
///
/// # Errors
/// Reason why the provider cannot be used.
pub fn offers(provider: &OfiProvider, bind: IpAddr) -> Result<Vec<Offer>, String> {
    let found = info::offers(provider, bind, device_capability())?;
    let offer = |info: &Info| Offer {
        domain: info.domain_name(),
        fabric: info.fabric_name(),
        max_part_bytes: info.max_message(),
        max_ranges: info.max_ranges(),
        registers_sources: info.registers_sources(),
        consumes_receives: info.consumes_receives(),
        progresses_by_itself: info.progresses_by_itself(),
        reaches_devices: info.reaches_devices(),
    };
    Ok(found.iter().map(offer).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_is_refused_while_libfabric_caches_registrations() {
        let refusal = |provider, variables: &[(&str, &str)]| {
            let value = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            refuse_cache(&OfiProvider::new(provider), value).err().map(|error| error.to_string())
        };
        let why = refusal("verbs;ofi_rxm", &[("FI_MR_CACHE_MAX_COUNT", "1024")]).unwrap();
        assert!(why.contains("verbs;ofi_rxm") && why.contains("FI_MR_CACHE_MAX_COUNT=0"), "{why}");
        assert!(refusal("verbs;ofi_rxm", &[]).is_some());
        assert_eq!(refusal("verbs;ofi_rxm", &[("FI_MR_CACHE_MAX_COUNT", "0")]), None);
        assert_eq!(refusal("verbs;ofi_rxm", &[("FI_MR_CACHE_MONITOR", "disabled")]), None);
        assert_eq!(refusal("tcp;ofi_rxm", &[]), None);
    }
}
