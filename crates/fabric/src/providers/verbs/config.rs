//! Device configuration, and how the environment chooses NICs.

use super::super::nic_names;
use super::nic_address::NicAddress;
use super::objects::provider_error;
use crate::error::Result;
use weft_environment as environment;

/// Pages in one part, each a work request: the rows in a 127-token decode batch, and a record for them.
pub const MAX_PAGES: u32 = 128;

/// Environment variable: [`VerbsChoice::devices`]; `all`: all active ports.
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
    /// None: a region beyond the locked memory limit is refused.
    Never,
    /// Those whose memory cannot be locked, on NICs that have on-demand paging.
    #[default]
    Auto,
    /// All; each NIC must have on-demand paging.
    Always,
}

impl OnDemandPaging {
    /// Environment variable values.
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

/// [`super::VerbsDevice`] configuration. A pair uses the smaller limits.
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
    /// Longest part in a write; the port's longest message bounds it too.
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

/// Explicit choice of NICs, and how they are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsChoice {
    /// NICs by name, or name and port, such as `mlx5_0:1`; port 1 without one. Empty: all active ports. A
    /// rank's first NIC is connected with each peer's first, and so on.
    pub devices: Vec<String>,
    /// Address that selects one of these NICs, for a pair's device. `None`: all.
    pub address: Option<NicAddress>,
    /// GID table entry, on each NIC. `None`: the first RoCE v2 entry with an IPv4 address, else the first
    /// RoCE v2 entry; 0 on InfiniBand.
    pub gid_index: Option<u32>,
    /// Packet traffic class (RoCE: DSCP in the upper six bits).
    pub traffic_class: u8,
    /// Packet service level, 0 to 15.
    pub service_level: u8,
    /// Time without an acknowledgement after which a packet is repeated, at most 31: 4.096 us times 2 to
    /// this power, for example 1.07 s for 18. After seven repetitions the peer is lost.
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
            // 1.07 s: eight outlive a link that comes back.
            ack_timeout: 18,
            on_demand_paging: OnDemandPaging::default(),
        }
    }
}

impl VerbsChoice {
    /// Choice by `WEFT_VERBS_DEVICES` (names with commas, or `all`), `WEFT_VERBS_GID_INDEX`,
    /// `WEFT_VERBS_TRAFFIC_CLASS`, `WEFT_VERBS_SERVICE_LEVEL`, `WEFT_VERBS_ACK_TIMEOUT` and
    /// `WEFT_VERBS_ON_DEMAND_PAGING`.
    ///
    /// # Errors
    /// [`crate::Error::Provider`] for a value out of range.
    pub fn from_env() -> Result<VerbsChoice> {
        let default = VerbsChoice::default();
        let get = |name: &str| environment::text(name).map_err(|e| provider_error(e.to_string()));
        let number = |name: &str, most: u32| -> Result<Option<u32>> {
            let Some(value) = get(name)? else { return Ok(None) };
            let number = value.parse().ok().filter(|number| *number <= most);
            let expected = || provider_error(format!("{name}={value}: expected 0 to {most}"));
            number.map(Some).ok_or_else(expected)
        };
        let byte = |name, most, default| -> Result<u8> {
            Ok(number(name, most)?.map_or(default, |it| it as u8))
        };
        let paging = get(ON_DEMAND_PAGING)?.map_or(Ok(default.on_demand_paging), |value| {
            let named = OnDemandPaging::ALL.into_iter().find(|it| it.name() == value);
            named.ok_or_else(|| {
                provider_error(format!(
                    "{ON_DEMAND_PAGING}={value}: expected never, auto or always"
                ))
            })
        })?;
        Ok(VerbsChoice {
            devices: nic_names::parse(get(DEVICES)?),
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
}

impl VerbsConfig {
    /// Checks that each value is in range.
    pub(super) fn check(&self) -> Result<()> {
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
