//! NICs: ports of RDMA devices, their addresses and limits, and the choice among them.

use super::library::Library;
use super::objects::{Context, Result, device_names};
use super::{DEVICES, GID_INDEX, VerbsConfig, sys};

/// Entries of a GID table that are read at most.
const MAX_GIDS: u32 = 1024;

/// Port of an RDMA device, with the GID that links use.
#[derive(Clone)]
pub struct Nic {
    /// Name of the device.
    pub device: String,
    /// Number of the port, from 1.
    pub port: u8,
    /// Number of its network: its place among the ports of the host, or among those that a configuration
    /// names. Ports of equal numbers are connected.
    pub network: u8,
    /// Entry of the GID table.
    pub gid: sys::GidEntry,
    pub attributes: sys::PortAttr,
    pub limits: sys::DeviceAttr,
}

impl Nic {
    /// Name with its port.
    pub fn name(&self) -> String {
        format!("{}:{}", self.device, self.port)
    }

    /// Firmware version.
    pub fn firmware(&self) -> String {
        let text = self.limits.fw_ver.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
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
    pub nic: Result<Nic>,
}

/// Ports of all RDMA devices of this host.
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
                    let network = found.len() as u8;
                    let nic = usable(&context, &device, port, network, gid_index);
                    found.push(Candidate { device: device.clone(), port, nic });
                }
            }
            Err(why) => found.push(Candidate { device, port: 1, nic: Err(why) }),
        }
    }
    Ok(found)
}

/// The port as a NIC in its present state, or the reason why it cannot be used.
pub fn usable(
    context: &Context,
    device: &str,
    port: u8,
    network: u8,
    gid_index: Option<u32>,
) -> Result<Nic> {
    let limits = context.attributes()?;
    let attributes = context.port(port)?;
    if attributes.state != sys::IBV_PORT_ACTIVE {
        return Err(format!("state of the port {}: expected ACTIVE", state_name(attributes.state)));
    }
    let is_ethernet = attributes.link_layer == sys::IBV_LINK_LAYER_ETHERNET;
    let gid = match gid_index {
        Some(index) => context.gid(port, index).ok_or_else(|| {
            format!("{GID_INDEX} {index}: the GID table has no such entry; `weft doctor` lists it")
        })?,
        None if is_ethernet => preferred_gid(context, port, attributes.gid_tbl_len).ok_or(
            "no GID of RoCE v2; give the interface an address, or name an entry in WEFT_VERBS_GID_INDEX",
        )?,
        None => context.gid(port, 0).unwrap_or_default(),
    };
    Ok(Nic { device: device.to_owned(), port, network, gid, attributes, limits })
}

/// First GID of RoCE v2 with an IPv4 address; without one, the first of RoCE v2.
fn preferred_gid(context: &Context, port: u8, length: i32) -> Option<sys::GidEntry> {
    let entries = 0..length.clamp(0, MAX_GIDS as i32) as u32;
    let mut of_v2 = entries
        .filter_map(|index| context.gid(port, index))
        .filter(|entry| entry.gid_type == sys::IBV_GID_TYPE_ROCE_V2);
    let first = of_v2.next()?;
    std::iter::once(first).chain(of_v2).find(|entry| is_ipv4(&entry.gid)).or(Some(first))
}

/// True for a GID made from an IPv4 address (`::ffff:a.b.c.d`).
fn is_ipv4(gid: &sys::Gid) -> bool {
    gid.0[..10] == [0; 10] && gid.0[10..12] == [0xff; 2]
}

/// Name of a port's state in the InfiniBand specification.
fn state_name(state: u32) -> &'static str {
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
            let reason = |it: &Candidate| {
                let why = it.nic.as_ref().err();
                format!("{}:{}: {}", it.device, it.port, why.map_or("", String::as_str))
            };
            let reasons: Vec<String> = candidates.iter().map(reason).collect();
            return Err(reasons.join("; "));
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
    let layers = nics.iter().map(|nic| nic.attributes.link_layer);
    if layers.clone().any(|layer| Some(layer) != layers.clone().next()) {
        let names: Vec<String> = nics.iter().map(Nic::name).collect();
        return Err(format!(
            "{}: InfiniBand and Ethernet ports together; name those of one kind in {DEVICES}",
            names.join(", ")
        ));
    }
    Ok(nics)
}

/// The NIC with a name: device, or device and port (`mlx5_0:1`).
fn named(candidates: &[Candidate], name: &str) -> Result<Nic> {
    let found = candidates.iter().find(|it| {
        let with_port = format!("{}:{}", it.device, it.port);
        name == with_port || name == it.device && it.port == 1
    });
    match found {
        Some(Candidate { nic, .. }) => nic.clone().map_err(|why| format!("{name}: {why}")),
        None => {
            let known: Vec<String> =
                candidates.iter().map(|it| format!("{}:{}", it.device, it.port)).collect();
            let known = known.join(", ");
            Err(format!("device {name}: this host has {known}; name one of these in {DEVICES}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
