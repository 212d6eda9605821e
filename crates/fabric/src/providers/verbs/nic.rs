//! NICs: RDMA device ports with addresses and limits, and how one is chosen.

use super::config::{DEVICES, GID_INDEX, ON_DEMAND_PAGING, OnDemandPaging, VerbsConfig};
use super::interfaces::{SYSFS, addresses_of_port, interfaces};
use super::library::Library;
use super::objects::{Context, Result, device_names};
use super::sys;
use std::net::IpAddr;
use std::path::Path;

/// GID table entries read at most: as many as an address handle can name.
const MAX_GIDS: i32 = 256;

/// RDMA device port, with the GID that links use.
#[derive(Clone)]
pub struct Nic {
    /// Device name.
    pub device: String,
    /// Port number, from 1.
    pub port: u8,
    /// Network number: the port's position among the host's ports, or among the configured ports. Ports
    /// with equal numbers are connected.
    pub network: u8,
    /// GID table entry.
    pub gid: sys::GidEntry,
    /// [`VerbsConfig::gid_index`] selects the entry.
    pub has_fixed_gid: bool,
    /// GID table entries that are in use.
    pub gids: Vec<sys::GidEntry>,
    /// Interface addresses on an InfiniBand port.
    pub interfaces: Vec<IpAddr>,
    /// Address that selected the NIC, if one did.
    pub address: Option<IpAddr>,
    pub attributes: sys::PortAttr,
    pub limits: sys::DeviceAttr,
    /// The device pages regions for RDMA writes on demand.
    pub on_demand_paging: bool,
}

impl Nic {
    /// Device name with port, such as `mlx5_0:1`.
    pub fn name(&self) -> String {
        format!("{}:{}", self.device, self.port)
    }

    /// True for RoCE.
    pub fn is_ethernet(&self) -> bool {
        self.attributes.link_layer == sys::IBV_LINK_LAYER_ETHERNET
    }
}

/// Port that a configuration may use, or the reason why not.
pub struct Candidate {
    pub device: String,
    pub port: u8,
    /// Device limits, if it can be opened.
    pub limits: Option<sys::DeviceAttr>,
    /// The device pages regions for RDMA writes on demand.
    pub on_demand_paging: bool,
    /// Port state, if the device can be opened.
    pub attributes: Option<sys::PortAttr>,
    /// GID table entries that are in use.
    pub gid_entries: u32,
    pub nic: Result<Nic>,
}

impl Candidate {
    /// Device name with port.
    pub fn name(&self) -> String {
        format!("{}:{}", self.device, self.port)
    }
}

/// Ports on all RDMA devices in this host.
///
/// # Errors
/// Reason why the devices cannot be listed.
pub fn candidates(library: &'static Library, gid_index: Option<u32>) -> Result<Vec<Candidate>> {
    let mut found = Vec::new();
    for device in device_names(library)? {
        let opened = Context::open(library, &device);
        let opened = opened.and_then(|context| Ok((context.attributes()?, context)));
        match opened {
            Ok((limits, context)) => {
                for port in 1..=limits.phys_port_cnt {
                    let place = Place { device: &device, port, network: found.len() as u8 };
                    found.push(candidate(&context, place, limits, gid_index));
                }
            }
            Err(why) => found.push(Candidate {
                device,
                port: 1,
                limits: None,
                on_demand_paging: false,
                attributes: None,
                gid_entries: 0,
                nic: Err(why),
            }),
        }
    }
    Ok(found)
}

/// Identifies a port.
struct Place<'a> {
    device: &'a str,
    port: u8,
    network: u8,
}

/// The NIC in the present state.
///
/// # Errors
/// Reason why it cannot be used any more.
pub fn renewed(context: &Context, nic: &Nic, gid_index: Option<u32>) -> Result<Nic> {
    let place = Place { device: &nic.device, port: nic.port, network: nic.network };
    let renewed = candidate(context, place, context.attributes()?, gid_index).nic?;
    let Some(address) = nic.address else { return Ok(renewed) };
    renewed
        .at(address)
        .ok_or_else(|| format!("address {address}: gone; give the interface this address again"))
}

/// A port on an open device.
fn candidate(
    context: &Context,
    Place { device, port, network }: Place<'_>,
    limits: sys::DeviceAttr,
    gid_index: Option<u32>,
) -> Candidate {
    let (device, attributes) = (device.to_owned(), context.port(port));
    let gids = attributes.as_ref().map_or_else(|_| Vec::new(), |it| gids(context, port, it));
    let gid_entries = gids.len() as u32;
    let on_demand_paging = context.pages_on_demand();
    let nic = attributes.clone().and_then(|attributes| {
        if is_iwarp(&device) {
            return Err("an iWARP device, which has no immediates; use the provider tcp".into());
        }
        check(&attributes, limits.max_srq)?;
        let table = || format!("/sys/class/infiniband/{device}/ports/{port}/gids");
        let gid = choose_gid(&attributes, &gids, gid_index, table)?;
        let interfaces = match attributes.link_layer {
            sys::IBV_LINK_LAYER_INFINIBAND => {
                addresses_of_port(Path::new(SYSFS), &device, port, &interfaces())
            }
            _ => Vec::new(),
        };
        Ok(Nic {
            device: device.clone(),
            port,
            network,
            gid,
            has_fixed_gid: gid_index.is_some(),
            gids,
            interfaces,
            address: None,
            attributes,
            limits,
            on_demand_paging,
        })
    });
    let (limits, attributes) = (Some(limits), attributes.ok());
    Candidate { device, port, limits, on_demand_paging, attributes, gid_entries, nic }
}

/// True for an iWARP device. Queue pairs on one connect like others, and refuse the first write with an
/// immediate.
fn is_iwarp(device: &str) -> bool {
    /// Node type for an iWARP NIC (`RDMA_NODE_RNIC` in the kernel).
    const RNIC: char = '4';
    let kind = std::fs::read_to_string(format!("/sys/class/infiniband/{device}/node_type"));
    kind.is_ok_and(|kind| kind.starts_with(RNIC))
}

/// Port GID table entries that are in use.
fn gids(context: &Context, port: u8, attributes: &sys::PortAttr) -> Vec<sys::GidEntry> {
    let entries = 0..attributes.gid_tbl_len.clamp(0, MAX_GIDS) as u32;
    entries.filter_map(|index| context.gid(port, index)).collect()
}

/// Checks that a port is active, and that the device has shared receive queues.
fn check(attributes: &sys::PortAttr, max_srq: i32) -> Result<()> {
    if max_srq <= 0 {
        return Err("no shared receive queues; use the provider ofi (EFA), or tcp".into());
    }
    if attributes.state == sys::IBV_PORT_ACTIVE {
        return Ok(());
    }
    let state = state_name(attributes.state);
    let remedy = if attributes.link_layer == sys::IBV_LINK_LAYER_ETHERNET {
        "connect its cable, and set its network interface up (ip link set NAME up)"
    } else if state == "DOWN" {
        "connect its cable"
    } else {
        "start a subnet manager (opensm) in its subnet"
    };
    Err(format!("state of the port {state}: expected ACTIVE; {remedy}"))
}

/// GID table entry that links use. `table`: where users find all entries.
fn choose_gid(
    attributes: &sys::PortAttr,
    gids: &[sys::GidEntry],
    gid_index: Option<u32>,
    table: impl Fn() -> String,
) -> Result<sys::GidEntry> {
    let at = |index| gids.iter().find(|entry| entry.gid_index == index).copied();
    match gid_index {
        Some(index) => at(index).ok_or_else(|| {
            format!("{GID_INDEX} {index}: no such entry in the GID table; {} lists them", table())
        }),
        None if attributes.link_layer == sys::IBV_LINK_LAYER_ETHERNET => {
            preferred_gid(gids).ok_or_else(|| {
                format!(
                    "no GID of RoCE v2; give the interface an address, or name an entry in {GID_INDEX}"
                )
            })
        }
        None => Ok(at(0).unwrap_or_default()),
    }
}

/// First RoCE v2 GID with an IPv4 address; without one, the first RoCE v2 GID.
fn preferred_gid(gids: &[sys::GidEntry]) -> Option<sys::GidEntry> {
    let mut of_v2 = gids.iter().filter(|entry| entry.gid_type == sys::IBV_GID_TYPE_ROCE_V2);
    let first = *of_v2.clone().next()?;
    Some(of_v2.find(|entry| is_ipv4(&entry.gid)).copied().unwrap_or(first))
}

/// True for a GID made from an IPv4 address (`::ffff:a.b.c.d`).
fn is_ipv4(gid: &sys::Gid) -> bool {
    gid.0[..10] == [0; 10] && gid.0[10..12] == [0xff; 2]
}

/// Device firmware version.
pub fn firmware(limits: &sys::DeviceAttr) -> String {
    let text = limits.fw_ver.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Data rate on a port's link in Mb/s; `None` for a width or speed code that is not known here.
pub fn rate(attributes: &sys::PortAttr) -> Option<u32> {
    let lanes = match attributes.active_width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return None,
    };
    let lane = match attributes.active_speed {
        // SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR.
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => return None,
    };
    Some(lanes * lane)
}

/// Port state name in the InfiniBand specification.
pub fn state_name(state: u32) -> &'static str {
    match state {
        1 => "DOWN",
        2 => "INIT",
        3 => "ARMED",
        sys::IBV_PORT_ACTIVE => "ACTIVE",
        5 => "ACTIVE_DEFER",
        _ => "unknown",
    }
}

/// NICs that a configuration names, or all that can be used.
///
/// # Errors
/// Reason why one that it names, or every one, cannot be used.
pub fn select(library: &'static Library, config: &VerbsConfig) -> Result<Vec<Nic>> {
    let candidates = candidates(library, config.gid_index)?;
    if candidates.is_empty() {
        return Err("this host has no RDMA device; `rdma link` of iproute2 lists them".into());
    }
    let nics = if config.devices.is_empty() {
        let usable: Vec<Nic> = candidates.iter().filter_map(|it| it.nic.clone().ok()).collect();
        if usable.is_empty() {
            return Err(reasons(&candidates));
        }
        usable
    } else {
        let named = config
            .devices
            .iter()
            .zip(0..)
            .map(|(name, network)| named(&candidates, name).map(|nic| Nic { network, ..nic }));
        named.collect::<Result<_>>()?
    };
    let nics = match &config.address {
        Some(address) => address.select(nics, &config.devices)?,
        None => nics,
    };
    let lacks_paging = |nic: &&Nic| !nic.on_demand_paging;
    if config.on_demand_paging == OnDemandPaging::Always
        && let Some(nic) = nics.iter().find(lacks_paging)
    {
        return Err(format!(
            "{}: {ON_DEMAND_PAGING}=always: the device or its driver has no on-demand paging for RDMA \
             writes; set auto or never, or leave the device out of {DEVICES}",
            nic.name()
        ));
    }
    let layers = nics.iter().map(|nic| nic.attributes.link_layer);
    if layers.clone().any(|layer| Some(layer) != layers.clone().next()) {
        let names: Vec<String> = nics.iter().map(Nic::name).collect();
        return Err(format!(
            "{}: InfiniBand and Ethernet ports together; name ports of one kind in {DEVICES}",
            names.join(", ")
        ));
    }
    Ok(nics)
}

/// Reasons why no port can be used: in full for one port, without remedies for several.
fn reasons(candidates: &[Candidate]) -> String {
    let why = |it: &Candidate| {
        let why = it.nic.as_ref().err().map_or("", String::as_str);
        format!("{}: {why}", it.name())
    };
    if let [only] = candidates {
        return why(only);
    }
    let reasons = candidates.iter().map(why);
    let reasons = reasons.map(|why| why.split("; ").next().unwrap_or_default().to_owned());
    format!("{}; `weft doctor` lists remedies", reasons.collect::<Vec<_>>().join(", "))
}

/// The NIC with a name: device, or device and port (`mlx5_0:1`).
fn named(candidates: &[Candidate], name: &str) -> Result<Nic> {
    let found = candidates.iter().find(|it| name == it.name() || name == it.device && it.port == 1);
    match found {
        Some(Candidate { nic, .. }) => nic.clone().map_err(|why| format!("{name}: {why}")),
        None => {
            let known: Vec<String> = candidates.iter().map(Candidate::name).collect();
            let known = known.join(", ");
            Err(format!("device {name}: this host has {known}; name one of these in {DEVICES}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ETHERNET: u8 = sys::IBV_LINK_LAYER_ETHERNET;
    const INFINIBAND: u8 = sys::IBV_LINK_LAYER_INFINIBAND;

    fn in_state(link_layer: u8, state: u32) -> sys::PortAttr {
        sys::PortAttr { state, link_layer, ..sys::PortAttr::default() }
    }

    fn entry(gid_index: u32, gid_type: u32, start: [u8; 16]) -> sys::GidEntry {
        sys::GidEntry { gid: sys::Gid(start), gid_index, gid_type, ..sys::GidEntry::default() }
    }

    #[test]
    fn a_port_that_cannot_be_used_has_a_reason_and_a_remedy() {
        for link_layer in [ETHERNET, INFINIBAND] {
            let active = in_state(link_layer, sys::IBV_PORT_ACTIVE);
            assert_eq!(check(&active, 1), Ok(()));
            assert!(check(&active, 0).unwrap_err().contains("the provider ofi (EFA)"));
        }
        for (link_layer, state, name, remedy) in [
            (ETHERNET, 1, "DOWN", "ip link set"),
            (INFINIBAND, 1, "DOWN", "cable"),
            (INFINIBAND, 2, "INIT", "subnet manager"),
        ] {
            let why = check(&in_state(link_layer, state), 1).unwrap_err();
            let (reason, how) = why.split_once("; ").unwrap();
            assert_eq!(reason, format!("state of the port {name}: expected ACTIVE"));
            assert!(how.contains(remedy), "{why}");
        }
    }

    #[test]
    fn the_gid_is_that_of_the_index_or_the_first_of_roce_v2_with_an_ipv4_address() {
        let (ethernet, infiniband) = (in_state(ETHERNET, 4), in_state(INFINIBAND, 4));
        let (mut ipv4, mut ipv6) = ([0; 16], [0; 16]);
        ipv4[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]);
        ipv6[0] = 0xfe;
        let v2 = sys::IBV_GID_TYPE_ROCE_V2;
        let gids = [entry(0, 1, ipv6), entry(1, v2, ipv6), entry(2, 1, ipv4), entry(5, v2, ipv4)];
        let chosen = |port: &sys::PortAttr, gids: &[sys::GidEntry], index| {
            choose_gid(port, gids, index, || "TABLE".into()).map(|entry| entry.gid_index)
        };
        assert_eq!(chosen(&ethernet, &gids, None), Ok(5));
        assert_eq!(chosen(&ethernet, &gids[..3], None), Ok(1));
        assert_eq!(chosen(&ethernet, &gids, Some(2)), Ok(2));
        assert_eq!(chosen(&infiniband, &gids, None), Ok(0));
        assert!(chosen(&ethernet, &gids[..1], None).unwrap_err().contains("RoCE v2"));
        let expected = "WEFT_VERBS_GID_INDEX 3: no such entry in the GID table; TABLE lists them";
        assert_eq!(chosen(&ethernet, &gids, Some(3)), Err(expected.into()));
    }

    #[test]
    fn reasons_of_several_ports_have_one_remedy() {
        let port = |port, why: &str| Candidate {
            device: "mlx5_0".into(),
            port,
            limits: None,
            on_demand_paging: false,
            attributes: None,
            gid_entries: 0,
            nic: Err(why.into()),
        };
        assert_eq!(reasons(&[port(1, "DOWN; a cable")]), "mlx5_0:1: DOWN; a cable");
        let both = [port(1, "DOWN; a cable"), port(2, "no GID; an address")];
        let expected = "mlx5_0:1: DOWN, mlx5_0:2: no GID; `weft doctor` lists remedies";
        assert_eq!(reasons(&both), expected);
    }

    #[test]
    fn the_rate_of_a_link_is_its_width_times_its_speed() {
        let rate = |active_width, active_speed| {
            rate(&sys::PortAttr { active_width, active_speed, ..sys::PortAttr::default() })
        };
        assert_eq!(rate(1, 1), Some(2_500));
        assert_eq!(rate(2, 32), Some(100_000));
        assert_eq!(rate(2, 128), Some(400_000));
        assert_eq!(rate(3, 1), None);
        assert_eq!(rate(2, 0), None);
    }

    #[test]
    fn an_ipv4_gid_is_recognised() {
        let mut gid = sys::Gid([0; 16]);
        assert!(!is_ipv4(&gid));
        gid.0[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]);
        assert!(is_ipv4(&gid));
        gid.0[0] = 0xfe;
        assert!(!is_ipv4(&gid));
    }
}
