//! Networks that libfabric reaches: EFA, and every other of its providers with reliable datagrams.
//!
//! A part is one RDMA write with the lane as its remote CQ data (`fi_writemsg`). Nothing is assumed of
//! order, nor that an arrival names its sender: the lane's holder is known from the lane table. The
//! library is loaded at run time. What a provider of libfabric demands of its caller, memory registration
//! modes above all, is read from its offer ([`info`]).
//!
//! Trust: the key of a region is the right to write to it. An endpoint for reliable datagrams can neither cut
//! off one peer nor check a grant per peer, so keys are random, a released region's key is void, and the
//! fence of a lost group is the close of its endpoints.
//!
//! - `library.rs`, `sys.rs`, `object.rs`: libfabric, its C layouts, its objects with owners
//! - `signals.rs`: the program's signal actions, kept while libfabric loads
//! - `info.rs`: what it offers
//! - `rail.rs`: one NIC of one group: endpoint, completion queue, writes under way
//! - `link/`, `peer.rs`, `region.rs`: one group's use of the device
//! - `wire.rs`: addresses, introductions, grants as bytes

mod info;
mod library;
mod link;
mod object;
mod peer;
mod rail;
mod region;
mod signals;
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
use object::Domain;
use std::ffi::CString;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use weft_control::HostIdentity;

/// How an [`OfiDevice`] is opened, cuts and queues. A pair of ranks takes the smaller of their
/// `max_part_bytes` and `max_unconsumed`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfiConfig {
    /// The provider of libfabric: `efa`, `efa-direct`, `tcp;ofi_rxm`, `tcp`, `shm`, `verbs;ofi_rxm`.
    pub provider: OfiProvider,
    /// Names this host, for providers that reach only ranks of their own.
    pub host_id: String,
    /// The address that endpoints listen on, for providers of the Internet protocol.
    pub bind: IpAddr,
    /// Domains (NICs) to use, by libfabric's names; a name may stand here several times. Empty: all NICs
    /// of `efa`, and the first offer of other providers.
    pub domains: Vec<String>,
    /// The longest part of a write.
    pub max_part_bytes: u64,
    /// The shortest write, in bytes, that is spread over several NICs.
    pub stripe_from: u64,
    /// Parts that may be under way on each NIC, at least 1.
    pub queue_parts: u32,
    /// Arrivals from each peer that may lie unconsumed, at least 4. Fewer if the peers are so many that
    /// a completion queue could overflow.
    pub max_unconsumed: u32,
    /// Arrivals whose lane is granted to another peer than their sender are dropped and counted, where the
    /// provider names senders (`FI_SOURCE`). Otherwise an arrival counts as its lane holder's.
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

/// Environment variables that choose provider and NICs.
pub const PROVIDER: &str = "WEFT_OFI_PROVIDER";
/// As above.
pub const DOMAINS: &str = "WEFT_OFI_DOMAINS";

/// As above: 1 sets [`OfiConfig::checks_senders`].
pub const CHECK_SENDERS: &str = "WEFT_OFI_CHECK_SENDERS";

/// Provider and NICs of libfabric, as far as they were chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfiChoice {
    /// [`OfiConfig::provider`]. `None`: `efa` where libfabric offers it, else `tcp;ofi_rxm`. One that was
    /// chosen is used, or opening the device fails.
    pub provider: Option<String>,
    /// [`OfiConfig::domains`].
    pub domains: Vec<String>,
    /// [`OfiConfig::checks_senders`].
    pub checks_senders: bool,
}

impl OfiChoice {
    /// The choice of `WEFT_OFI_PROVIDER`, `WEFT_OFI_DOMAINS` (names with commas) and
    /// `WEFT_OFI_CHECK_SENDERS` (1 or nothing).
    pub fn from_env() -> OfiChoice {
        let get = |name| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let split = |names: String| names.split(',').map(|name| name.trim().to_owned()).collect();
        let domains = get(DOMAINS).map_or_else(Vec::new, split);
        OfiChoice {
            provider: get(PROVIDER).map(|name| name.trim().to_owned()),
            domains,
            checks_senders: get(CHECK_SENDERS).is_some_and(|value| value.trim() == "1"),
        }
    }

    /// A configuration with what was chosen.
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

    /// Looks for the library, the provider and the NICs, and opens none of them.
    ///
    /// # Errors
    /// [`Error::Provider`] if one of them is not there.
    pub fn check(&self) -> Result<()> {
        let bind = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let config = OfiConfig { bind, ..self.resolve(bind) };
        let offers = info::offers(&config.provider, bind, 0).map_err(unusable)?;
        choose(&config, offers).map(drop)
    }
}

/// NICs of this host as libfabric reaches them. See the module's page.
#[derive(Clone)]
pub struct OfiDevice {
    config: OfiConfig,
    domains: Vec<Arc<Domain>>,
}

impl OfiDevice {
    /// The NICs of this configuration.
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
                return Err(unusable(format!("{name} {value}: choose {least} to {most}")));
            }
        }
        let wanted = with_devices() | if config.checks_senders { sys::FI_SOURCE } else { 0 };
        let offers = info::offers(&config.provider, config.bind, wanted).map_err(unusable)?;
        let chosen = choose(&config, offers)?;
        let name = config.provider.is_of_one_host().then(shm_name).transpose()?;
        let domains = chosen.into_iter().map(|mut info| {
            name.iter().for_each(|name| info.name_endpoints(name));
            Domain::open(info).map(Arc::new)
        });
        let domains = domains.collect::<Result<Vec<_>, String>>().map_err(unusable)?;
        Ok(OfiDevice { config, domains })
    }

    /// Names of the NICs in use.
    pub fn domains(&self) -> impl Iterator<Item = String> {
        self.domains.iter().map(|domain| domain.info().domain_name())
    }
}

/// The capability to reach memory of CUDA devices, on a host with a driver for them.
fn with_devices() -> u64 {
    if weft_cuda::driver().is_ok() { sys::FI_HMEM } else { 0 }
}

/// The offers that a configuration names, or the provider's own.
fn choose(config: &OfiConfig, offers: Vec<Info>) -> Result<Vec<Info>> {
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
            unusable(format!(
                "domain {name}: provider {provider} offers {names}{at}; choose of these in {DOMAINS}"
            ))
        })
    };
    config.domains.iter().map(named).collect()
}

fn unusable(detail: impl Into<String>) -> Error {
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

    /// Providers that emulate remote writes make progress only inside of calls.
    fn demands_thread(&self) -> bool {
        !self.domains.iter().all(|domain| domain.info().progresses_by_itself())
    }
}

/// A name that no other process has. libfabric's own is the process's number: a process that was killed
/// leaves its file behind, and keeps a later one of the same number out.
fn shm_name() -> Result<CString> {
    let mut random = [0; 8];
    getrandom::fill(&mut random)
        .map_err(|e| unusable(format!("the system gives no random bytes: {e}")))?;
    let (process, random) = (std::process::id(), u64::from_le_bytes(random));
    let name = CString::new(format!("fi_shm://weft-{process}-{random:016x}"));
    name.map_err(|_| unusable("its name has a zero byte"))
}

/// The bounds within which endpoints of a provider reach each other, for providers that have bounds.
fn realm(config: &OfiConfig) -> Vec<u8> {
    let HostIdentity { boot, network, processes, user, .. } = HostIdentity::here();
    let mut realm = Vec::new();
    if config.provider.is_of_one_host() {
        put_block(&mut realm, config.host_id.as_bytes());
        put_block(&mut realm, processes.as_bytes());
        realm.extend(user.to_le_bytes());
    } else if config.provider.is_ip() && config.bind.is_loopback() {
        put_block(&mut realm, boot.as_bytes());
        put_block(&mut realm, network.as_bytes());
    }
    realm
}

/// A provider of libfabric as this host has it, for `weft doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The domain: a NIC.
    pub domain: String,
    /// The fabric: a network.
    pub fabric: String,
    /// The most bytes and ranges of one part.
    pub max_part_bytes: u64,
    /// As above.
    pub max_ranges: u32,
    /// Sources must be registered.
    pub registers_sources: bool,
    /// Each arrival consumes a posted receive.
    pub consumes_receives: bool,
    /// Writes go on without calls into the library.
    pub progresses_by_itself: bool,
    /// Memory of CUDA devices can be registered.
    pub reaches_devices: bool,
}

/// Path and version (major, minor) of the libfabric of this process.
///
/// # Errors
/// Why there is none.
pub fn library() -> Result<(std::path::PathBuf, (u32, u32)), String> {
    let library = Library::get()?;
    Ok((library.path().clone(), library.version()))
}

/// Names of the providers that the libfabric of this process has, with or without NICs of theirs.
///
/// # Errors
/// Why there is no library.
pub fn built_in() -> Result<Vec<String>, String> {
    info::built_in()
}

/// What this host offers of a provider; `bind`: the address that endpoints would listen on.
///
/// # Errors
/// Why the provider cannot be used.
pub fn offers(provider: &OfiProvider, bind: IpAddr) -> Result<Vec<Offer>, String> {
    let found = info::offers(provider, bind, with_devices())?;
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
