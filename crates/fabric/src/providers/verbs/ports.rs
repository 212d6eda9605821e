//! RDMA device ports on this host, for `weft doctor`.

use super::config::VerbsChoice;
use super::library::Library;
use super::{nic, sys};
use crate::error::Result;

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
