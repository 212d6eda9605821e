//! InfiniBand and RoCE over libibverbs: reliable connections of ConnectX and any other RC device.
//!
//! Each pair of ranks has a queue pair on each NIC that both have. A part is a chain of RDMA writes, of which
//! the last carries the lane as its immediate: the order of a connection makes one arrival of the chain.
//! Receives, which arrivals consume, are shared by all queue pairs of a NIC. The library is loaded at run
//! time.
//!
//! Trust: an arrival comes from the peer of its queue pair, and a lane granted to another peer is dropped.
//! A key covers its region as a whole: the range of a grant is checked by the writer. The fence of a peer
//! destroys its queue pairs, after which no NIC accesses memory for it.
//!
//! - `library.rs`, `sys.rs`, `objects.rs`: libibverbs, its C layouts, its objects with owners
//! - `fork.rs`: registered memory of a process that forks
//! - `gpu.rs`: memory of GPUs as NICs register it, and the flush of what they have written there
//! - `nic.rs`: ports, their GIDs and limits, and the choice among them; `nic_address.rs`: that of one connection;
//!   `interfaces.rs`: addresses of ports of InfiniBand
//! - `rail.rs`: one NIC of one group: completion queue, shared receives, keys
//! - `pair.rs`, `chains.rs`: queue pair toward one peer, and its work requests in flight
//! - `link/`, `peer.rs`, `region.rs`: one group's use of the device
//! - `wire.rs`: addresses and introductions as bytes
//! - `twin/`: NICs in this process, for tests without hardware

mod chains;
mod fork;
mod gpu;
mod interfaces;
mod library;
mod link;
mod names;
mod nic;
mod nic_address;
mod objects;
mod pair;
mod peer;
mod rail;
mod region;
mod sys;
mod twin;
mod wire;

#[doc(hidden)]
pub use gpu::{Flush, Gpus};
pub use library::PATH as LIBRARY_PATH;
pub use nic_address::NicAddress;
#[doc(hidden)]
pub use sys::layout;
#[doc(hidden)]
pub use twin::{
    TwinChains, TwinConfig, TwinEvent, TwinFault, TwinGpuControls, TwinGpus, TwinNic, TwinPort,
    TwinStatistics,
};

use crate::device::Device;
use crate::error::Result;
use crate::link::{Link, Membership};
use crate::types::ProviderKind;
use gpu::CudaGpus;
use library::Library;
use link::VerbsLink;
use nic::Nic;
use objects::provider_error;
use std::sync::Arc;

/// Pages of one part, each a work request: the rows of a decode batch of 127 tokens, and their records.
pub const MAX_PAGES: u32 = 128;

/// Environment variable: [`VerbsChoice::devices`].
pub const DEVICES: &str = "WEFT_VERBS_DEVICES";
/// Environment variable: [`VerbsChoice::gid_index`].
pub const GID_INDEX: &str = "WEFT_VERBS_GID_INDEX";
/// Environment variable: [`VerbsChoice::traffic_class`].
pub const TRAFFIC_CLASS: &str = "WEFT_VERBS_TRAFFIC_CLASS";
/// Environment variable: [`VerbsChoice::service_level`].
pub const SERVICE_LEVEL: &str = "WEFT_VERBS_SERVICE_LEVEL";
/// Environment variable: [`VerbsChoice::ack_timeout`].
pub const ACK_TIMEOUT: &str = "WEFT_VERBS_ACK_TIMEOUT";

/// Environment variable: [`VerbsChoice::on_demand_paging`], by [`OnDemandPaging::name`].
pub const ON_DEMAND_PAGING: &str = "WEFT_VERBS_ON_DEMAND_PAGING";

/// Regions in host memory whose pages a NIC faults in when it accesses them, instead of locking them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDemandPaging {
    /// None: a region beyond the limit of locked memory is refused.
    Never,
    /// Those whose memory cannot be locked, on NICs that have on-demand paging.
    #[default]
    Auto,
    /// All; each NIC must have on-demand paging.
    Always,
}

impl OnDemandPaging {
    /// Values of the environment variable.
    pub const ALL: [OnDemandPaging; 3] =
        [OnDemandPaging::Never, OnDemandPaging::Auto, OnDemandPaging::Always];

    /// Value in the environment variable.
    pub fn name(self) -> &'static str {
        match self {
            OnDemandPaging::Never => "never",
            OnDemandPaging::Auto => "auto",
            OnDemandPaging::Always => "always",
        }
    }
}

/// Configuration of a [`VerbsDevice`]. A pair of ranks uses the smaller of their limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsConfig {
    /// [`VerbsChoice::devices`].
    pub devices: Vec<String>,
    /// [`VerbsChoice::address`].
    pub address: Option<NicAddress>,
    /// [`VerbsChoice::gid_index`].
    pub gid_index: Option<u32>,
    /// [`VerbsChoice::traffic_class`].
    pub traffic_class: u8,
    /// [`VerbsChoice::service_level`].
    pub service_level: u8,
    /// [`VerbsChoice::ack_timeout`].
    pub ack_timeout: u8,
    /// [`VerbsChoice::on_demand_paging`].
    pub on_demand_paging: OnDemandPaging,
    /// Longest part of a write; the port's longest message bounds it too.
    pub max_part_bytes: u64,
    /// Shortest write, in bytes, that is striped over several NICs.
    pub stripe_from: u64,
    /// Work requests in flight toward each peer on each NIC, at least 1. Fewer if a completion queue could
    /// overflow with this many peers.
    pub queue_requests: u32,
    /// Unconsumed arrivals from each peer, at least 4. Fewer if a completion queue could overflow with this
    /// many peers.
    pub max_unconsumed: u32,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        VerbsChoice::default().resolve()
    }
}

/// Explicit choice of NICs and of their use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsChoice {
    /// NICs by name, or name and port (`mlx5_0:1`); port 1 without one. Empty: all active ports. The first
    /// NIC of a rank is connected with the first of its peers, and so on.
    pub devices: Vec<String>,
    /// Address that selects one of these NICs, for the device of a pair. `None`: all.
    pub address: Option<NicAddress>,
    /// Entry of the GID table, on each NIC. `None`: the first of RoCE v2 with an IPv4 address, else the first
    /// of RoCE v2; 0 on InfiniBand.
    pub gid_index: Option<u32>,
    /// Traffic class of packets (RoCE: DSCP in its upper six bits).
    pub traffic_class: u8,
    /// Service level of packets, 0 to 15.
    pub service_level: u8,
    /// Time without an acknowledgement after which a packet is repeated, at most 31: 4.096 us times 2 to
    /// this power. After seven repetitions the peer is lost.
    pub ack_timeout: u8,
    /// Regions in host memory that are paged on demand.
    pub on_demand_paging: OnDemandPaging,
}

impl Default for VerbsChoice {
    fn default() -> Self {
        VerbsChoice {
            devices: Vec::new(),
            address: None,
            gid_index: None,
            traffic_class: 0,
            service_level: 0,
            // 1.07 s: eight of them outlive a link that comes back.
            ack_timeout: 18,
            on_demand_paging: OnDemandPaging::default(),
        }
    }
}

impl VerbsChoice {
    /// Choice by `WEFT_VERBS_DEVICES` (names with commas), `WEFT_VERBS_GID_INDEX`,
    /// `WEFT_VERBS_TRAFFIC_CLASS`, `WEFT_VERBS_SERVICE_LEVEL`, `WEFT_VERBS_ACK_TIMEOUT` and
    /// `WEFT_VERBS_ON_DEMAND_PAGING`.
    ///
    /// # Errors
    /// [`crate::Error::Provider`] for a value out of range.
    pub fn from_env() -> Result<VerbsChoice> {
        let default = VerbsChoice::default();
        let get = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let split = |names: String| names.split(',').map(|name| name.trim().to_owned()).collect();
        let number = |name: &str, most: u32| -> Result<Option<u32>> {
            let Some(value) = get(name) else { return Ok(None) };
            let number = value.trim().parse().ok().filter(|number| *number <= most);
            let expected = || provider_error(format!("{name}={value}: expected 0 to {most}"));
            number.map(Some).ok_or_else(expected)
        };
        let byte = |name, most, default| -> Result<u8> {
            Ok(number(name, most)?.map_or(default, |it| it as u8))
        };
        let paging = get(ON_DEMAND_PAGING).map_or(Ok(default.on_demand_paging), |value| {
            let named = OnDemandPaging::ALL.into_iter().find(|it| it.name() == value.trim());
            named.ok_or_else(|| {
                provider_error(format!(
                    "{ON_DEMAND_PAGING}={value}: expected never, auto or always"
                ))
            })
        })?;
        Ok(VerbsChoice {
            devices: get(DEVICES).map_or_else(Vec::new, split),
            address: None,
            gid_index: number(GID_INDEX, 255)?,
            traffic_class: byte(TRAFFIC_CLASS, 255, default.traffic_class)?,
            service_level: byte(SERVICE_LEVEL, 15, default.service_level)?,
            ack_timeout: byte(ACK_TIMEOUT, 31, default.ack_timeout)?,
            on_demand_paging: paging,
        })
    }

    /// Configuration with this choice.
    pub fn resolve(&self) -> VerbsConfig {
        let choice = self.clone();
        VerbsConfig {
            devices: choice.devices,
            address: choice.address,
            gid_index: choice.gid_index,
            traffic_class: choice.traffic_class,
            service_level: choice.service_level,
            ack_timeout: choice.ack_timeout,
            on_demand_paging: choice.on_demand_paging,
            max_part_bytes: 1 << 30,
            stripe_from: 128 << 10,
            queue_requests: 256,
            max_unconsumed: 256,
        }
    }

    /// Checks that library and NICs exist, without opening a device.
    ///
    /// # Errors
    /// [`crate::Error::Provider`] if one of them is missing.
    pub fn check(&self) -> Result<()> {
        let library = Library::get().map_err(provider_error)?;
        nic::select(library, &self.resolve()).map(drop).map_err(provider_error)
    }
}

/// RDMA NICs of this host. See the module's page.
pub struct VerbsDevice {
    library: &'static Library,
    config: Arc<VerbsConfig>,
    nics: Vec<Nic>,
    gpus: Arc<dyn Gpus>,
    /// NICs of this process in place of the host's.
    _twins: Vec<Arc<TwinNic>>,
}

impl VerbsDevice {
    /// Finds the NICs of a configuration.
    ///
    /// # Errors
    /// [`crate::Error::Provider`] if a value is out of range, there is no libibverbs, or a NIC is missing or
    /// not active. No other provider takes its place.
    pub fn new(config: VerbsConfig) -> Result<VerbsDevice> {
        config.check()?;
        let library = Library::get().map_err(provider_error)?;
        VerbsDevice::with(library, config, Arc::new(CudaGpus), Vec::new())
    }

    /// Device over simulated NICs, in place of [`VerbsConfig::devices`].
    ///
    /// # Errors
    /// Those of [`VerbsDevice::new`].
    #[doc(hidden)]
    pub fn over(config: VerbsConfig, twins: &[Arc<TwinNic>]) -> Result<VerbsDevice> {
        let gpus = TwinGpus::new(&Arc::default());
        VerbsDevice::over_with_gpus(config, twins, Arc::new(gpus))
    }

    /// [`VerbsDevice::over`], with simulated GPUs or a wrapper around them.
    ///
    /// # Errors
    /// Those of [`VerbsDevice::new`].
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

    /// Names of the NICs in use, with their ports.
    pub fn nics(&self) -> impl Iterator<Item = String> {
        self.nics.iter().map(Nic::name)
    }
}

impl VerbsConfig {
    /// Checks that each value is in its range.
    fn check(&self) -> Result<()> {
        let limits = [
            ("max_part_bytes", self.max_part_bytes, 1, u64::MAX),
            ("queue_requests", self.queue_requests.into(), 1, 1 << 15),
            ("max_unconsumed", self.max_unconsumed.into(), 4, 1 << 20),
            ("service_level", self.service_level.into(), 0, 15),
            ("ack_timeout", self.ack_timeout.into(), 0, 31),
        ];
        for (name, value, least, most) in limits {
            if !(least..=most).contains(&value) {
                return Err(provider_error(format!("{name} {value}: expected {least} to {most}")));
            }
        }
        Ok(())
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

/// Port of an RDMA device of this host, for `weft doctor`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortReport {
    /// Device and port.
    pub name: String,
    /// Name of the device.
    pub device: String,
    /// Reason why the provider cannot use it. GID and MTU are empty then; if the device cannot be opened, all
    /// fields below are.
    pub unusable: Option<String>,
    /// State in the InfiniBand specification: `ACTIVE`.
    pub state: &'static str,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: &'static str,
    /// Data rate of the link, width times speed, in Mb/s.
    pub rate: Option<u32>,
    /// Entry of the GID table in use, and its index.
    pub gid: Option<(String, u32)>,
    /// Entries of the GID table that are not empty.
    pub gid_entries: u32,
    /// Longest packet in bytes, without headers.
    pub mtu: u32,
    /// Longest message in bytes.
    pub max_message: u32,
    /// Firmware version.
    pub firmware: String,
    /// Entries of a completion queue, work requests of a send queue, receives of a shared queue.
    pub limits: [i32; 3],
    /// True if the device pages regions of RDMA writes on demand.
    pub on_demand_paging: bool,
}

/// Path of the libibverbs of this process.
///
/// # Errors
/// Reason why it is missing.
pub fn library() -> Result<std::path::PathBuf, String> {
    Ok(Library::get()?.path.clone())
}

/// True if the libibverbs of this process registers memory of GPUs by dma-buf (rdma-core 34).
pub fn registers_dma_bufs() -> bool {
    Library::get().is_ok_and(|library| library.reg_dmabuf_mr.is_some())
}

/// Ports of all RDMA devices of this host.
///
/// # Errors
/// Reason why they cannot be listed.
pub fn ports(choice: &VerbsChoice) -> Result<Vec<PortReport>, String> {
    let found = nic::candidates(Library::get()?, choice.gid_index)?;
    Ok(found.into_iter().map(report).collect())
}

fn report(candidate: nic::Candidate) -> PortReport {
    let mut found =
        PortReport { name: candidate.name(), device: candidate.device, ..PortReport::default() };
    if let Some(limits) = &candidate.limits {
        found.firmware = nic::firmware(limits);
        found.on_demand_paging = candidate.on_demand_paging;
        found.limits = [limits.max_cqe, limits.max_qp_wr, limits.max_srq_wr];
    }
    if let Some(port) = &candidate.attributes {
        found.state = nic::state_name(port.state);
        found.link_layer = match port.link_layer {
            sys::IBV_LINK_LAYER_ETHERNET => "Ethernet",
            sys::IBV_LINK_LAYER_INFINIBAND => "InfiniBand",
            _ => "",
        };
        found.rate = nic::rate(port);
        found.gid_entries = candidate.gid_entries;
        found.max_message = port.max_msg_sz;
    }
    match candidate.nic {
        Err(why) => found.unusable = Some(why),
        Ok(nic) => {
            let gid = std::net::Ipv6Addr::from(nic.gid.gid.0);
            found.gid = Some((gid.to_string(), nic.gid.gid_index));
            found.mtu = 128 << nic.attributes.active_mtu.clamp(1, 5);
        }
    }
    found
}
