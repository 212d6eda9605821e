//! Registry of providers: the one list that programs, the command line and the docs read.
//!
//! A device is opened once for each configuration and shared by all groups of the process; it is closed
//! with the last of them.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::providers::copy::{CopyConfig, CopyDevice, Devices};
use crate::providers::hostile::{Hostile, HostileConfig};
use crate::providers::ofi::{OfiChoice, OfiConfig, OfiDevice};
use crate::providers::shm::{ShmConfig, ShmDevice};
use crate::providers::tcp::{TcpConfig, TcpDevice};
use crate::types::ProviderKind;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What the devices of a process need in order to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Names this host. Processes with different names count as different hosts.
    pub host_id: String,
    /// The address that sockets listen on.
    pub bind: IpAddr,
    /// The address that peers dial, if it is not `bind`.
    pub advertise: Option<IpAddr>,
    /// Whose memory and copy engines the copy provider uses.
    pub devices: Devices,
    /// For tests: the seed of a [`Hostile`] wrapper around the device.
    pub hostile: Option<u64>,
    /// Provider and NICs of libfabric that the ofi provider uses.
    pub ofi: OfiChoice,
}

/// A provider.
pub struct Provider {
    /// Its kind, which also is its place in the order in which routes prefer providers.
    pub kind: ProviderKind,
    /// The peers that it reaches.
    pub reaches: &'static str,
    /// How bytes travel.
    pub how: &'static str,
    /// Whether a communicator uses it unless configured otherwise.
    pub is_default: bool,
    /// The names under which programs ask for it; the first is its kind's. None if its groups are of one
    /// process.
    pub names: &'static [&'static str],
    open: fn(&DeviceConfig) -> Result<Arc<dyn Device>>,
}

/// All providers, in the order in which a route prefers them.
pub fn all() -> &'static [Provider] {
    &PROVIDERS
}

static PROVIDERS: [Provider; 5] = [
    Provider {
        kind: ProviderKind::Sim,
        reaches: "ranks of one process, in tests",
        how: "virtual time and a seed",
        is_default: false,
        names: &[],
        open: |_| {
            let detail = "it joins ranks of one process: use it through its World".into();
            Err(Error::Provider { provider: ProviderKind::Sim, detail })
        },
    },
    Provider {
        kind: ProviderKind::Copy,
        reaches: "GPUs of one host",
        how: "copy engines driven by the host",
        is_default: false,
        names: &["copy", "copy-twin"],
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
        open: |config| {
            let host_id = config.host_id.clone();
            Ok(Arc::new(ShmDevice::new(ShmConfig { host_id })))
        },
    },
    Provider {
        kind: ProviderKind::Ofi,
        reaches: "EFA, and whatever libfabric reaches",
        how: "RDMA writes with immediate data through libfabric, loaded at run time",
        is_default: false,
        names: &["ofi"],
        open: |config| {
            let host_id = config.host_id.clone();
            let bind = config.advertise.unwrap_or(config.bind);
            let chosen = config.ofi.resolve(bind);
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
        open: |config| {
            let (bind, advertise) = (config.bind, config.advertise);
            Ok(Arc::new(TcpDevice::new(TcpConfig { bind, advertise, ..TcpConfig::default() })?))
        },
    },
];

/// The provider that programs ask for by this name, and the devices that it uses then: `copy-twin` is
/// the copy provider with host memory in place of devices, for tests.
pub fn named(name: &str) -> Option<(ProviderKind, Devices)> {
    let kind = all().iter().find(|provider| provider.names.contains(&name))?.kind;
    let is_twin = name != kind.name();
    Some((kind, if is_twin { Devices::Twin { seed: 0 } } else { Devices::default() }))
}

/// All names that [`named`] takes, in the order of [`all`].
pub fn names() -> impl Iterator<Item = &'static str> {
    all().iter().flat_map(|provider| provider.names).copied()
}

/// The providers that a communicator uses unless configured otherwise.
pub fn defaults() -> Vec<ProviderKind> {
    all().iter().filter(|provider| provider.is_default).map(|provider| provider.kind).collect()
}

/// Looks for what a provider needs of this machine, and opens nothing. Most providers need nothing that a
/// machine may lack.
///
/// # Errors
/// [`Error::Provider`] if it cannot be used here.
pub fn check(kind: ProviderKind, ofi: &OfiChoice) -> Result<()> {
    if kind == ProviderKind::Ofi { ofi.check() } else { Ok(()) }
}

struct Opened {
    kind: ProviderKind,
    config: DeviceConfig,
    device: Weak<dyn Device>,
}

/// Devices that some group of this process uses.
static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

/// The device of a provider with this configuration: the one that is open, or a new one.
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
    let mut device = (provider.open)(config)?;
    if let Some(seed) = config.hostile {
        device = Arc::new(Hostile::over(device, HostileConfig::new(seed)));
    }
    opened.push(Opened { kind, config: config.clone(), device: Arc::downgrade(&device) });
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
            devices: Devices::Twin { seed: 0 },
            hostile: None,
            ofi: OfiChoice::default(),
        }
    }

    #[test]
    fn groups_share_a_device_for_as_long_as_one_of_them_uses_it() {
        let first = open(ProviderKind::Shm, &config("shared")).unwrap();
        let second = open(ProviderKind::Shm, &config("shared")).unwrap();
        let other = open(ProviderKind::Shm, &config("other")).unwrap();
        assert!(Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&first, &other));
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
                // Hosts may lack libfabric.
                Err(error) => assert!(
                    matches!(provider.kind, ProviderKind::Sim | ProviderKind::Ofi),
                    "{error}"
                ),
            }
        }
    }
}
