//! RDMA device ports on this host, for `weft doctor`.

use super::config::VerbsChoice;
use super::library::Library;
use super::{nic, sys};
use std::net::Ipv6Addr;

/// RDMA device port on this host, for `weft doctor`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortReport {
    /// Device and port.
    pub name: String,
    /// Device name.
    pub device: String,
    /// Reason why the provider cannot use it. GID and MTU are empty then; if the device cannot be opened, all
    /// fields below are.
    pub unusable: Option<String>,
    /// State in the InfiniBand specification: `ACTIVE`.
    pub state: &'static str,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: &'static str,
    /// Link data rate, width times speed, in Mb/s.
    pub rate: Option<u32>,
    /// GID table entry in use, and the index of the entry.
    pub gid: Option<(String, u32)>,
    /// GID table entries that are not empty.
    pub gid_entries: u32,
    /// Longest packet in bytes, without headers.
    pub mtu: u32,
    /// Longest message in bytes.
    pub max_message: u32,
    /// Firmware version.
    pub firmware: String,
    /// Completion queue entries, send queue work requests, shared queue receives.
    pub limits: [i32; 3],
    /// True if the device pages regions for RDMA writes on demand.
    pub on_demand_paging: bool,
}

/// Path of this process's libibverbs.
///
/// # Errors
/// Reason why it is missing.
pub fn library() -> Result<std::path::PathBuf, String> {
    Ok(Library::get()?.path.clone())
}

/// True if this process's libibverbs registers GPU memory by dma-buf (rdma-core 34).
pub fn registers_dma_bufs() -> bool {
    Library::get().is_ok_and(|library| library.reg_dmabuf_mr.is_some())
}

/// Ports on all RDMA devices in this host.
///
/// # Errors
/// Reason why they cannot be listed.
pub fn ports(choice: &VerbsChoice) -> Result<Vec<PortReport>, String> {
    let found = nic::candidates(Library::get()?, choice.gid_index)?;
    Ok(found.into_iter().map(report).collect())
}

/// Names of the ports that can be used, if ranks may choose different ones: then a rank's first NIC is connected with
/// another one at its peer.
///
/// # Errors
/// Reason why ports cannot replace each other: another link layer, or another InfiniBand subnet. Subnets of RoCE are
/// not known here; a network without routes between them needs `WEFT_VERBS_DEVICES=all`.
pub fn equal_ports(ports: &[PortReport]) -> Result<Vec<String>, String> {
    let usable: Vec<&PortReport> = ports.iter().filter(|port| port.unusable.is_none()).collect();
    let subnet = |port: &&PortReport| -> Option<u64> {
        let (gid, _) = port.gid.as_ref().filter(|_| port.link_layer == "InfiniBand")?;
        Some((gid.parse::<Ipv6Addr>().ok()?.to_bits() >> 64) as u64)
    };
    if let Some(first) = usable.first() {
        if usable.iter().any(|port| port.link_layer != first.link_layer) {
            return Err("InfiniBand and Ethernet ports are active".into());
        }
        if usable.iter().any(|port| subnet(port) != subnet(first)) {
            return Err("active ports are in different InfiniBand subnets".into());
        }
    }
    Ok(usable.iter().map(|port| port.name.clone()).collect())
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
            let gid = Ipv6Addr::from(nic.gid.gid.0);
            found.gid = Some((gid.to_string(), nic.gid.gid_index));
            found.mtu = 128 << nic.attributes.active_mtu.clamp(1, 5);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str, link_layer: &'static str, gid: &str) -> PortReport {
        let gid = Some((gid.to_owned(), 0));
        PortReport { name: name.into(), link_layer, gid, ..PortReport::default() }
    }

    #[test]
    fn ports_are_equal_in_one_subnet_on_one_link_layer() {
        let roce = [port("a:1", "Ethernet", "::ffff:10.0.0.1"), port("b:1", "Ethernet", "fe80::1")];
        assert_eq!(equal_ports(&roce), Ok(vec!["a:1".into(), "b:1".into()]));
        let mut infiniband =
            [port("a:1", "InfiniBand", "fe80::1"), port("b:1", "InfiniBand", "fe80::2")];
        assert_eq!(equal_ports(&infiniband).map(|ports| ports.len()), Ok(2));
        let why = equal_ports(&[roce[0].clone(), infiniband[0].clone()]).unwrap_err();
        assert_eq!(why, "InfiniBand and Ethernet ports are active");
        infiniband[1].gid = Some(("fec0:0:0:1::2".into(), 0));
        let why = equal_ports(&infiniband).unwrap_err();
        assert_eq!(why, "active ports are in different InfiniBand subnets");
        // A port that cannot be used does not count.
        infiniband[1].unusable = Some("state of the port DOWN".into());
        assert_eq!(equal_ports(&infiniband), Ok(vec!["a:1".into()]));
    }
}
