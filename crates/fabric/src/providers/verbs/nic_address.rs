//! NIC for one connection: the NIC with this end's control connection address.
//!
//! A connector with a source uses only the NIC that has it, and marks it by network number. The listener
//! follows with the NIC that has the address at which it accepted the connection. Without the mark, both
//! use all NICs.

use super::wire::VerbsAddress;
use std::net::IpAddr;

/// Address by which a device selects one NIC: from a RoCE v2 entry in the NIC's GID table, or on
/// InfiniBand from an interface on the port (IPoIB).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicAddress {
    /// Local address.
    pub address: IpAddr,
    /// If no NIC has this address, a device is refused; otherwise it has the first chosen NIC.
    pub is_demanded: bool,
}

/// Network of NICs that were selected by address. No host has as many NICs, so two ends share no network
/// if only one has selected.
pub(super) const SELECTED: u8 = u8::MAX;

impl NicAddress {
    /// A connector's selection by source.
    pub fn of_source(address: IpAddr) -> NicAddress {
        NicAddress { address, is_demanded: true }
    }

    /// A listener's selection at an accepted connection's local address, if the connector has selected.
    /// `connector`: the connector's link address; a malformed one is reported by the introduction.
    pub fn of_listener(address: IpAddr, connector: &[u8]) -> Option<NicAddress> {
        let connector = VerbsAddress::decode(connector)?;
        let has_selected = connector.ports.iter().any(|port| port.network == SELECTED);
        has_selected.then_some(NicAddress { address, is_demanded: false })
    }
}
