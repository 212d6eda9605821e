//! Provider registry: the one list that programs, pairs, the command line and the documents read.
//!
//! A device is opened once for each configuration and shared by all groups in the process; it is closed
//! with the last one.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::peer_memory;
use crate::providers::copy::{self, CopyBackend, CopyConfig, CopyDevice};
use crate::providers::hostile::{HostileConfig, HostileDevice};
use crate::providers::ofi::{OfiChoice, OfiConfig, OfiDevice};
use crate::providers::shm::{ShmConfig, ShmDevice};
use crate::providers::staged::{
    self, HEADER_ROOM, StagedConfig, StagedDevice, StagedMode, Staging,
};
use crate::providers::tcp::{AdoptedTcp, Adoption, TcpConfig, TcpDevice};
use crate::providers::verbs::{VerbsChoice, VerbsDevice};
use crate::types::ProviderKind;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Configuration for a process's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Host name. Processes with different names count as different hosts.
    pub host_id: String,
    /// The address that sockets listen on.
    pub bind: IpAddr,
    /// The address that peers dial, if it is not `bind`.
    pub advertise: Option<IpAddr>,
    /// Memory and copy engines for the copy provider.
    pub devices: CopyBackend,
    /// Providers with a [`StagedDevice`] wrapper around the device.
    pub staged: Staging,
    /// Seed for a [`HostileDevice`] wrapper around the device, for tests.
    pub hostile: Option<u64>,
    /// Libfabric provider and NICs that the ofi provider uses; `None`: [`OfiChoice::from_env`].
    pub ofi: Option<OfiChoice>,
    /// NICs that the verbs provider uses; `None`: [`VerbsChoice::from_env`].
    pub verbs: Option<VerbsChoice>,
}

/// Device configuration for one pair.
pub(crate) struct PairDeviceConfig {
    /// Host name.
    pub host_id: String,
    /// Data connection that tcp takes over.
    pub adoption: Adoption,
    /// Local control connection address, also used for ofi's endpoints.
    pub local: IpAddr,
    /// Memory and copy engines for the copy provider.
    pub devices: CopyBackend,
    /// Libfabric provider and NICs that the ofi provider uses.
    pub ofi: OfiChoice,
    /// NICs that the verbs provider uses.
    pub verbs: VerbsChoice,
    /// Providers that carry GPU memory through slots, among shm and tcp.
    pub staged: Staging,
}

impl PairDeviceConfig {
    /// Device configuration for all pairs in this process at one address.
    fn shared(&self) -> DeviceConfig {
        DeviceConfig {
            host_id: self.host_id.clone(),
            bind: self.local,
            advertise: None,
            devices: self.devices,
            staged: Staging::Never,
            hostile: None,
            ofi: Some(self.ofi.clone()),
            verbs: Some(self.verbs.clone()),
        }
    }
}

/// Constructor for one pair's device.
type OpenPair = fn(&PairDeviceConfig) -> Result<Arc<dyn Device>>;

/// A provider.
pub struct Provider {
    /// Provider kind; kinds ascend in the order in which routes prefer them.
    pub kind: ProviderKind,
    /// The peers that it reaches.
    pub reaches: &'static str,
    /// Transport mechanism.
    pub how: &'static str,
    /// True if a communicator uses it by default.
    pub is_default: bool,
    /// Names in configuration, the kind's first. Empty for a provider within one process.
    pub names: &'static [&'static str],
    /// Device for one pair (`weft.listen`, `weft.connect`); `None` if pairs cannot use it.
    open_pair: Option<OpenPair>,
    open: fn(&DeviceConfig) -> Result<Arc<dyn Device>>,
}

/// All providers, in the order in which a route prefers them.
pub fn all() -> &'static [Provider] {
    &PROVIDERS
}

static PROVIDERS: [Provider; 6] = [
    Provider {
        kind: ProviderKind::Sim,
        reaches: "ranks of one process, in tests",
        how: "virtual time and a seed",
        is_default: false,
        names: &[],
        open_pair: None,
        open: |_| {
            let detail = "it joins ranks of one process: use it through its World".into();
            Err(Error::Provider { provider: ProviderKind::Sim, detail })
        },
    },
    Provider {
        kind: ProviderKind::Copy,
        reaches: "GPUs of one host",
        how: "copy engines driven by the host; lists of pages by kernels",
        is_default: false,
        names: &["copy", "copy-twin"],
        open_pair: Some(|config| open(ProviderKind::Copy, &config.shared())),
        open: |config| {
            let (host_id, devices) = (config.host_id.clone(), config.devices);
            Ok(Arc::new(CopyDevice::new(CopyConfig { host_id, devices })?))
        },
    },
    Provider {
        kind: ProviderKind::Shm,
        reaches: "ranks of one host",
        how: "stores into shared mappings",
        is_default: true,
        names: &["shm"],
        open_pair: Some(|config| {
            let host_id = config.host_id.clone();
            // A pair moves messages, which are never read in place.
            Ok(Arc::new(ShmDevice::new(ShmConfig { host_id }).with_reads(false)))
        }),
        open: |config| {
            let host_id = config.host_id.clone();
            let reads = peer_memory::reads_from_env()?;
            Ok(Arc::new(ShmDevice::new(ShmConfig { host_id }).with_reads(reads)))
        },
    },
    Provider {
        kind: ProviderKind::Verbs,
        reaches: "InfiniBand and RoCE",
        how: "RDMA writes with immediate data on reliable connections; libibverbs, loaded at run time",
        is_default: false,
        names: &["verbs"],
        // Each pair opens separate queue pairs.
        open_pair: Some(|config| open(ProviderKind::Verbs, &config.shared())),
        open: |config| Ok(Arc::new(VerbsDevice::new(chosen(&config.verbs)?.resolve())?)),
    },
    Provider {
        kind: ProviderKind::Ofi,
        reaches: "EFA, and whatever libfabric reaches",
        how: "RDMA writes with immediate data through libfabric, loaded at run time",
        is_default: false,
        names: &["ofi"],
        // Each pair opens separate endpoints.
        open_pair: Some(|config| open(ProviderKind::Ofi, &config.shared())),
        open: |config| {
            let host_id = config.host_id.clone();
            let bind = config.advertise.unwrap_or(config.bind);
            let chosen = ofi_choice(&config.ofi)?.resolve(bind);
            let ofi = OfiConfig { host_id, bind, ..chosen };
            Ok(Arc::new(OfiDevice::new(ofi)?))
        },
    },
    Provider {
        kind: ProviderKind::Tcp,
        reaches: "any host",
        how: "sockets, every frame checked against its grant",
        is_default: true,
        names: &["tcp"],
        open_pair: Some(|config| {
            Ok(Arc::new(AdoptedTcp::new(config.adoption.clone(), tcp_config())))
        }),
        open: |config| {
            let (bind, advertise) = (config.bind, config.advertise);
            Ok(Arc::new(TcpDevice::new(TcpConfig { bind, advertise, ..tcp_config() })?))
        },
    },
];

/// Provider with this name, such as `shm`, and a backend: `copy-twin` is the copy provider with host
/// memory in place of devices, for tests.
pub fn named(name: &str) -> Option<(ProviderKind, CopyBackend)> {
    let kind = all().iter().find(|provider| provider.names.contains(&name))?.kind;
    let is_twin = name != kind.name();
    Some((kind, if is_twin { CopyBackend::Twin { seed: 0 } } else { CopyBackend::default() }))
}

/// All names that [`named`] takes, in the same order as [`all`].
pub fn names() -> impl Iterator<Item = &'static str> {
    all().iter().flat_map(|provider| provider.names).copied()
}

/// Default providers for a communicator.
pub fn defaults() -> Vec<ProviderKind> {
    all().iter().filter(|provider| provider.is_default).map(|provider| provider.kind).collect()
}

/// Providers that pairs can use.
pub fn of_pairs() -> Vec<ProviderKind> {
    let of_pairs = all().iter().filter(|provider| provider.open_pair.is_some());
    of_pairs.map(|provider| provider.kind).collect()
}

/// Default providers for pairs.
pub fn pair_defaults() -> Vec<ProviderKind> {
    let used = |provider: &&Provider| provider.open_pair.is_some() && provider.is_default;
    all().iter().filter(used).map(|provider| provider.kind).collect()
}

/// Opens a provider's device for one pair.
///
/// # Errors
/// [`Error::Provider`] if pairs cannot use it, or this machine cannot.
pub(crate) fn open_pair(kind: ProviderKind, config: &PairDeviceConfig) -> Result<Arc<dyn Device>> {
    let provider = all().iter().find(|provider| provider.kind == kind);
    let names = || of_pairs().iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ");
    let refused = || Error::Provider {
        provider: kind,
        detail: format!("pairs use {}; choose from these", names()),
    };
    let open = provider.and_then(|provider| provider.open_pair).ok_or_else(refused)?;
    let device = open(config)?;
    match kind {
        ProviderKind::Shm | ProviderKind::Tcp => wrapped(kind, device, config.staged),
        // Listeners read these providers' addresses before they have a link.
        _ => Ok(device),
    }
}

/// A device with a [`StagedDevice`] wrapper, if the choice has one for it. Tcp always has one: tcp links
/// read the addresses of wrapped ones, and step aside where neither end has GPUs.
fn wrapped(
    kind: ProviderKind,
    device: Arc<dyn Device>,
    choice: Staging,
) -> Result<Arc<dyn Device>> {
    let (mode, engines) = match (kind, choice) {
        (ProviderKind::Copy, _) => return Ok(device),
        (_, Staging::Always(engines)) => (StagedMode::Always, engines),
        (ProviderKind::Tcp, Staging::Automatic(engines)) => {
            let has_gpus = staged::has_gpus(engines);
            (StagedMode::Automatic { has_gpus }, engines)
        }
        (ProviderKind::Tcp, Staging::Never) => (StagedMode::Never, CopyBackend::default()),
        _ => return Ok(device),
    };
    let config = StagedConfig { mode, engines, ..StagedConfig::default() };
    Ok(Arc::new(StagedDevice::over(device, config)?))
}

/// Limits for tcp under the wrapper, whose slots have headers.
fn tcp_config() -> TcpConfig {
    let default = TcpConfig::default();
    TcpConfig { max_part_bytes: default.max_part_bytes + HEADER_ROOM, ..default }
}

/// NICs that a configuration chooses for the verbs provider.
fn chosen(verbs: &Option<VerbsChoice>) -> Result<VerbsChoice> {
    verbs.clone().map_or_else(VerbsChoice::from_env, Ok)
}

/// Libfabric provider and NICs that a configuration chooses for the ofi provider.
pub(crate) fn ofi_choice(ofi: &Option<OfiChoice>) -> Result<OfiChoice> {
    ofi.clone().map_or_else(OfiChoice::from_env, Ok)
}

/// Checks the variables for all providers that a configuration leaves to the environment: an invalid
/// value is an error, whichever providers are used.
///
/// # Errors
/// [`Error::Provider`].
pub(crate) fn check_variables(ofi: &Option<OfiChoice>, verbs: &Option<VerbsChoice>) -> Result<()> {
    ofi_choice(ofi)?;
    chosen(verbs)?;
    copy::sms_from_env().map_err(copy::provider_error)?;
    peer_memory::reads_from_env().map(drop)
}

/// Checks that this machine has a provider's libraries, without opening a device. Only verbs and ofi need
/// any, and copy for GPUs: see [`CopyBackend::check`].
///
/// # Errors
/// [`Error::Provider`] if it cannot be used here.
pub fn check(
    kind: ProviderKind,
    ofi: &Option<OfiChoice>,
    verbs: &Option<VerbsChoice>,
) -> Result<()> {
    match kind {
        ProviderKind::Ofi => ofi_choice(ofi)?.check(),
        ProviderKind::Verbs => chosen(verbs)?.check(),
        _ => Ok(()),
    }
}

struct OpenDevice {
    kind: ProviderKind,
    config: DeviceConfig,
    device: Weak<dyn Device>,
}

/// Devices open in this process.
static OPENED: Mutex<Vec<OpenDevice>> = Mutex::new(Vec::new());

/// A provider's device with this configuration: the one that is open, or a new one.
///
/// # Errors
/// [`Error::Provider`] if it cannot be used here.
pub fn open(kind: ProviderKind, config: &DeviceConfig) -> Result<Arc<dyn Device>> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.retain(|entry| entry.device.strong_count() > 0);
    let known = opened.iter().find(|entry| entry.kind == kind && entry.config == *config);
    if let Some(device) = known.and_then(|entry| entry.device.upgrade()) {
        return Ok(device);
    }
    let provider = all().iter().find(|provider| provider.kind == kind);
    let provider = provider
        .ok_or_else(|| Error::Provider { provider: kind, detail: "it is not built in".into() })?;
    let mut device = wrapped(kind, (provider.open)(config)?, config.staged)?;
    if let Some(seed) = config.hostile {
        device = Arc::new(HostileDevice::over(device, HostileConfig::new(seed)));
    }
    opened.push(OpenDevice { kind, config: config.clone(), device: Arc::downgrade(&device) });
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn config(host_id: &str) -> DeviceConfig {
        DeviceConfig {
            host_id: host_id.into(),
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            advertise: None,
            devices: CopyBackend::Twin { seed: 0 },
            staged: Staging::Never,
            hostile: None,
            ofi: Some(OfiChoice::default()),
            verbs: None,
        }
    }

    #[test]
    fn groups_share_a_device_for_as_long_as_one_of_them_uses_it() {
        let first = open(ProviderKind::Shm, &config("shared")).unwrap();
        let second = open(ProviderKind::Shm, &config("shared")).unwrap();
        let other = open(ProviderKind::Shm, &config("other")).unwrap();
        assert!(Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&first, &other));
        let staged =
            DeviceConfig { staged: Staging::Always(CopyBackend::default()), ..config("shared") };
        assert!(!Arc::ptr_eq(&first, &open(ProviderKind::Shm, &staged).unwrap()));
        let hostile = DeviceConfig { hostile: Some(1), ..config("shared") };
        assert!(!Arc::ptr_eq(&first, &open(ProviderKind::Shm, &hostile).unwrap()));
        let gone = Arc::downgrade(&first);
        drop((first, second));
        assert!(gone.upgrade().is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "tcp opens a socket, and isolated miri has none")]
    fn providers_stand_in_the_order_of_preference_under_their_own_kind() {
        let kinds: Vec<ProviderKind> = all().iter().map(|provider| provider.kind).collect();
        assert!(kinds.is_sorted() && kinds.windows(2).all(|pair| pair[0] != pair[1]));
        for provider in all() {
            assert_eq!(ProviderKind::from_wire(provider.kind as u8), Some(provider.kind));
            assert!(provider.names.iter().all(|name| named(name).unwrap().0 == provider.kind));
            match open(provider.kind, &config("each")) {
                Ok(device) => assert_eq!(device.kind(), provider.kind),
                // Hosts may lack libfabric and RDMA NICs.
                Err(error) => assert!(
                    matches!(
                        provider.kind,
                        ProviderKind::Sim | ProviderKind::Verbs | ProviderKind::Ofi
                    ),
                    "{error}"
                ),
            }
        }
    }
}
